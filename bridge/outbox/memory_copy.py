"""What an outbox in memory begins with: a copy of the database on disk, or an outline of it.

A database above 10 MiB is not copied, because an agent on a full disk must not be killed for its memory next. Its
outline is what the stream needs to go on; the backlog waits for the disk, and with it every event of which something
waits there (the table `held`), so that no record overtakes another.

Where the disk hangs, it is read on a thread of its own, for a moment; what is known of the stream must do otherwise.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

from bridge.errors import OutboxError
from bridge.events.diff import is_over
from bridge.outbox import database, meta, recovery
from bridge.outbox.database import SQL, transaction
from bridge.outbox.recovery import COUNTS
from bridge.outbox.stalls import COMMIT_SECONDS
from bridge.system.threads import run_daemon

logger = logging.getLogger("bridge.outbox.storage")  # the name that logs are filtered by, for all of its parts

#: What is taken into memory of a database on disk.
COPIED_BYTES = 10 * 1024 * 1024
#: Of so many records memory knows the ids when it is no copy, so that a change seen again gets its repeat.
_RECENT_IDS = 2_000


def read_beside(
    path: Path, reader: sqlite3.Connection | None, known: Mapping[str, str], *, is_being_replaced: bool
) -> tuple[sqlite3.Connection, bool]:
    """Return a copy in memory of what is on the disk, or an outline of it, and which of these it is.

    It is read by *reader*, or at *path* when there is none, while another thread hangs in a call to the disk; *known*
    is what was last committed.
    """
    found = run_daemon("outbox-copy", _copied, path, reader, known if is_being_replaced else {})
    with suppress(Exception):  # whatever it is, the disk gave nothing
        return found.result(COMMIT_SECONDS)
    memory = database.open_memory()
    with transaction(memory):
        _outline(memory, [], known)
        _hold_all(memory, known)
    return memory, False


def _copied(path: Path, reader: sqlite3.Connection | None, known: Mapping[str, str]) -> tuple[sqlite3.Connection, bool]:
    source = reader or database.open_to_read(path)
    if source is None:
        raise OutboxError(f"{path} cannot be read.")
    with closing(source):
        memory = copy_whole(source, path)
        if memory is not None:
            return memory, True
        memory = database.open_memory()
        with transaction(memory):
            _outline(memory, [source], known)
            if meta.get(memory, "next_sequence") is None:
                raise OutboxError(f"{path} could be read in part only.")
        return memory, False


def copy_outline(sources: Iterable[sqlite3.Connection], known: Mapping[str, str]) -> sqlite3.Connection:
    """Return an outbox in memory with *known* meta and, of *sources*, what the stream needs to go on."""
    memory = database.open_memory()
    with transaction(memory):
        _outline(memory, sources, known)
    return memory


def _outline(memory: sqlite3.Connection, sources: Iterable[sqlite3.Connection], known: Mapping[str, str]) -> None:
    for key, value in known.items():
        meta.put(memory, key, value)
    for source in sources:
        _copy_outline(source, memory)
        recovery.copy_holds(source, memory)
    recovery.keep_sequence_ahead(memory)


def is_large(source: sqlite3.Connection) -> bool:
    """Return whether *source* is more than is taken into memory, as far as it can be read."""
    try:
        return _size(source) > COPIED_BYTES
    except sqlite3.Error:
        return False


def _size(source: sqlite3.Connection) -> int:
    pages, size = (int(source.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
    return pages * size


def copy_whole(source: sqlite3.Connection, path: Path) -> sqlite3.Connection | None:
    """Return a copy of *source* in memory; None when it is too large, or its disk or its pages do not allow it."""
    try:
        if _size(source) > COPIED_BYTES:
            return None
        memory = database.open_memory(empty=True)
        try:
            source.backup(memory)
            database.check(memory, path)
            database.create_schema(memory)  # of an agent that died before it made the tables
            database.add_tables(memory)
        except BaseException:
            memory.close()
            raise
    except sqlite3.Error:
        return None
    return memory


def _copy_outline(source: sqlite3.Connection, memory: sqlite3.Connection) -> None:
    """Copy what the stream needs to go on without the records: all but what *memory* has already.

    That is meta, the totals, which events wait on the disk, recent ids, and the last record of each active event, which
    a sink that is new gets.
    """
    is_held = False
    try:
        for key, value in source.execute(SQL["get_meta"]).fetchall():
            if meta.get(memory, key) is None:
                meta.put(memory, key, value)
        memory.executemany(SQL["leave_on_disk"], source.execute(SQL["waiting_events"]))
        is_held = True
        document = meta.document_of(meta.read_meta(memory))
        for key in () if document is None else {event.key for event in document.events if not is_over(event)}:
            memory.executemany(SQL["paste_record"], source.execute(SQL["copy_last_of_event"], (key,)))
        memory.executemany(SQL["paste_record"], source.execute(SQL["copy_recent_ids"], (_RECENT_IDS,)))
        for name, *counts in source.execute(SQL["copy_sinks"]).fetchall():
            set_totals(memory, name, counts)
    except sqlite3.Error as error:
        logger.info("The outbox on disk could be read in part only.", extra={"why": str(error)})
        if not is_held:
            _hold_all(memory, meta.read_meta(memory))


def _hold_all(memory: sqlite3.Connection, known: Mapping[str, str]) -> None:
    """Have every event of the document in *known* wait for the disk: what waits there cannot be told."""
    document = meta.document_of(known)
    events = () if document is None else document.events
    memory.executemany(SQL["leave_on_disk"], [(event.key,) for event in events])


def set_totals(connection: sqlite3.Connection, name: str, counts: Iterable[int]) -> None:
    """Set the totals of the sink *name*, in the order of `COUNTS`."""
    values: dict[str, object] = {"name": name}
    values.update(zip(COUNTS, counts, strict=True))
    connection.execute(SQL["set_totals"], values)
