"""What a damaged database still has on its leaf pages, where SQLite cannot get to them: as `.recover` reads it.

The pages of a database are small, so the schema and the roots of all tables lie close together at the beginning of the
file. One strike there takes every table away from SQLite, although nearly all rows are sound.

To which table a row belongs is told by its columns, their number and their types; what the rows mean is not looked at
here. They are put into an outbox of their own, from which `recovery` takes what makes sense as from any other.

Rows that were deleted stay in the file until something is written over them. They must not rise again: what no cell
pointer names is not read, nor is a free page. Where it is in doubt whether a page is free, its rows yield to those of
pages that are in use for sure, and what is finished stays so: a record is rather sent again than lost.
"""

from __future__ import annotations

import io
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bridge.outbox import database
from bridge.outbox.database import SQL, transaction
from bridge.outbox.page_file import INDEX_INTERIOR, TABLE_LEAF, PageFile

#: What is read of a larger file is put beside it on the disk, or in part into memory where the disk has no room.
_IN_MEMORY_BYTES = 10 * 1024 * 1024
_MOST_ROW_BYTES = 32 * 1024 * 1024
#: Times are seconds since 1970: from 1973 to 5138.
_FIRST_TIME, _LAST_TIME = 1e8, 1e11
_LAST_INTEGER = 2**63 - 1
#: After so many rows of a page that belong to no table it is taken for one of an index.
_TRIED_ROWS = 4

Value = int | float | str | None
Row = tuple[Value, ...]
#: Number of bytes of a value by its serial type; then there are 8 and 9, which are 0 and 1, and texts.
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
_REAL, _ONE, _EMPTY_TEXT = 7, 9, 13
#: A byte of a number that is not its last has this bit.
_MORE = 0x80


class _Column(NamedTuple):
    type: str
    may_be_null: bool

    def takes(self, value: Value) -> bool:
        if value is None:
            return self.may_be_null
        if self.type == "TEXT":
            return isinstance(value, str)
        if isinstance(value, str):
            return False
        if self.type == "INTEGER":
            return isinstance(value, int) and 0 <= value <= _LAST_INTEGER
        return value == 0 or _FIRST_TIME <= value < _LAST_TIME


#: The tables by whether their rows have a row id, and the number of columns. Two columns without: `meta` and `begun`.
_TABLES = {
    (True, 2): "decision_tokens",
    (True, 7): "records",
    (True, 17): "decisions",
    (False, 2): "meta",
    (False, 5): "approvals",
    (False, 9): "sinks",
    (False, 10): "deliveries",
}
_STATEMENTS = {
    "decision_tokens": "paste_any_token",
    "records": "put_record",
    "decisions": "paste_decision",
    "approvals": "paste_approval",
    "deliveries": "paste_delivery",
}


def open_damaged(path: Path | None) -> list[sqlite3.Connection]:
    """Return what the damaged database at *path* can be read by: SQLite, and its leaf pages where that fails."""
    connection = database.open_to_read(path)
    if connection is not None and _reads_to_the_end(connection):
        return [connection]
    leaves = None if path is None else read_leaf_pages(path)
    return [each for each in (connection, leaves) if each is not None]


def _reads_to_the_end(connection: sqlite3.Connection) -> bool:
    try:
        return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def read_leaf_pages(path: Path) -> sqlite3.Connection | None:
    """Return an outbox with the rows on the leaf pages of the file at *path*, None when there are none."""
    with suppress(OSError):
        if path.is_symlink():
            return None
        if _size(path) > _IN_MEMORY_BYTES:
            with suppress(OSError, sqlite3.Error):  # no room on the disk
                return _filled(_open_beside(path), path, limit_bytes=None)
        with suppress(sqlite3.Error):
            return _filled(database.open_memory(), path, limit_bytes=_IN_MEMORY_BYTES)
    return None


def _size(path: Path) -> int:
    wal = Path(f"{path}-wal")
    return path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)


def _open_beside(path: Path) -> sqlite3.Connection:
    """Return an empty outbox in a file of its own, that goes when it is closed."""
    name = f"{path}-leaves"
    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        connection = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            database.create_schema(connection)
            database.add_tables(connection)
        except BaseException:
            connection.close()
            raise
    finally:
        with suppress(OSError):  # Windows deletes no file that is open
            Path(name).unlink()
    return connection


def _open_wal(path: Path) -> BinaryIO:
    try:
        return Path(f"{path}-wal").open("rb")
    except OSError:
        return io.BytesIO()


def _filled(target: sqlite3.Connection, path: Path, *, limit_bytes: int | None) -> sqlite3.Connection | None:
    try:
        with path.open("rb") as file, _open_wal(path) as wal, transaction(target):
            is_found = _fill(target, PageFile(file, wal), limit_bytes)
    except BaseException:
        target.close()
        raise
    if not is_found:
        target.close()
        return None
    return target


def _fill(target: sqlite3.Connection, pages: PageFile, limit_bytes: int | None) -> bool:
    """Put the rows of *pages* into *target*; return whether there are any."""
    columns = {name: _columns(target, name) for name in _TABLES.values()}
    pairs: dict[Row, Row] = {}
    totals: dict[Value, Row] = {}
    is_found = False
    for page in pages.row_pages():
        for table, row in _rows(page, pages):
            if not all(column.takes(value) for column, value in zip(columns[table], row, strict=True)):
                continue
            is_found = True
            if table == "meta":
                pairs.setdefault(row, row)
            elif table == "sinks":
                totals.setdefault(row[0], row)
            elif table != "records" or limit_bytes is None or database.used_bytes(target) < limit_bytes:
                with suppress(sqlite3.IntegrityError):  # the row makes no sense: the database has refused it
                    target.execute(SQL[_STATEMENTS[table]], row)
    for row in totals.values():
        _set_totals(target, row)
    _put_pairs(target, list(pairs))
    return is_found


def _columns(connection: sqlite3.Connection, table: str) -> list[_Column]:
    rows = connection.execute('SELECT type, "notnull", pk FROM pragma_table_info(?)', (table,))
    return [_Column(kind, not (is_required or key)) for kind, is_required, key in rows]


def _set_totals(target: sqlite3.Connection, row: Row) -> None:
    """Set the totals of a sink if they are consistent, since nothing else tells whether they are sound."""
    name, accepted, *ends, nudges = row
    if accepted == sum(count for count in ends if isinstance(count, int)):
        values = dict(zip(("delivered", "pending", "parked", "expired", "evicted", "discarded"), ends, strict=True))
        target.execute(SQL["set_totals"], {"name": name, "accepted": accepted, "nudges": nudges, **values})


def _put_pairs(target: sqlite3.Connection, pairs: list[Row]) -> None:
    """Put rows of two texts where they belong: that of a start mark is a sink's name, and its event is no JSON."""
    sinks = {name for (name,) in target.execute(SQL["known_sinks"])}
    for key, value in pairs:
        is_start_mark = key in sinks and not str(value).startswith("{")
        target.execute(SQL["add_start_mark" if is_start_mark else "paste_meta"], (key, value))


def _rows(page: bytes, pages: PageFile) -> Iterator[tuple[str, Row]]:
    """Yield the rows of *page*, each with its table; all of a page are of one."""
    is_table = page[0] == TABLE_LEAF
    child_bytes = 4 if page[0] == INDEX_INTERIOR else 0
    begin = 8 + child_bytes
    (count,) = struct.unpack_from(">H", page, 3)
    end = begin + 2 * count
    if end > pages.usable:
        return
    found: str | None = None
    for number, pointer in enumerate(struct.unpack_from(f">{count}H", page, begin)):
        if found is None and number == _TRIED_ROWS:
            return
        if not end <= pointer < pages.usable:
            continue
        try:
            row = _row(page, pointer + child_bytes, pages, is_table=is_table)
        except (IndexError, ValueError, struct.error):
            continue
        if row is not None and found in (None, _TABLES[is_table, len(row)]):
            found = _TABLES[is_table, len(row)]
            yield found, row


def _row(page: bytes, at: int, pages: PageFile, *, is_table: bool) -> Row | None:
    """Return the row of the cell *at* this place, None for that of an index; raise when it makes no sense."""
    size, at = _varint(page, at)
    row_id = None
    if is_table:
        row_id, at = _varint(page, at)
    header_size, body = _varint(page, at)
    types = []
    while body < at + header_size:
        kind, body = _varint(page, body)
        types.append(kind)
    if (is_table, len(types)) not in _TABLES:
        return None
    if size > _MOST_ROW_BYTES or header_size + sum(map(_size_of, types)) != size:
        raise ValueError(size)
    payload = _payload(page, at, size, pages, is_table=is_table)
    values, place = [], header_size
    for kind in types:
        length = _size_of(kind)
        values.append(_value(kind, payload[place : place + length]))
        place += length
    return (row_id, *values[1:]) if is_table else tuple(values)


def _payload(page: bytes, at: int, size: int, pages: PageFile, *, is_table: bool) -> bytes:
    """Return *size* bytes from *at* on: some in the page, the rest in a chain of overflow pages (1.6 of the format)."""
    usable = pages.usable
    most = usable - 35 if is_table else (usable - 12) * 64 // 255 - 23
    if size <= most:
        payload = page[at : at + size]
    else:
        least = (usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (usable - 4)
        local = local if local <= most else least
        parts, missing = [page[at : at + local]], size - local
        (following,) = struct.unpack_from(">I", page, at + local)
        while missing > 0 and 1 < following <= pages.count:
            overflow = pages.page(following)
            (following,) = struct.unpack_from(">I", overflow)
            parts.append(overflow[4 : 4 + min(missing, usable - 4)])
            missing -= usable - 4
        payload = b"".join(parts)
    if len(payload) != size:
        raise ValueError(size)
    return payload


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number *at* this place, and where it ends."""
    value = content[at]
    if value < _MORE:
        return value, at + 1
    value &= 0x7F
    for place in range(at + 1, at + 8):
        byte = content[place]
        value = value << 7 | byte & 0x7F
        if byte < _MORE:
            return value, place + 1
    return value << 8 | content[at + 8], at + 9


def _size_of(kind: int) -> int:
    if kind < len(_SIZES):
        return _SIZES[kind]
    if kind < _EMPTY_TEXT or kind % 2 == 0:
        raise ValueError(kind)  # a blob, of which the outbox has none
    return (kind - _EMPTY_TEXT) // 2


def _value(kind: int, content: bytes) -> Value:
    """Return a value by its serial type; raise ValueError for a text that is none."""
    if kind >= len(_SIZES):
        return content.decode()
    if kind == 0:
        return None
    if kind > _REAL:
        return int(kind == _ONE)
    if kind == _REAL:
        return float(struct.unpack(">d", content)[0])
    return int.from_bytes(content, "big", signed=True)
