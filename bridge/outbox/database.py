"""One database file: how it is opened, how its errors are told apart, how it is put out of the way.

SQLite says what is wrong in words. What matters here is which of three answers a word asks for: the disk refuses (go
on in memory, come back), the file is damaged (set it aside, save what can be read), another program writes (wait).

A file that holds records is never deleted, and a symbolic link in its place is never followed: the agent may be root,
and the link somebody else's. SQLite itself follows none for the -wal and -shm beside the file.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path

from bridge.errors import OutboxError
from bridge.outbox.volume import file_bytes, wal_bytes, wal_of

DATABASE = "outbox.db"
SCHEMA_VERSION = 1
BUSY_SECONDS = 5.0
#: A transition changes a little on some twenty pages, and a commit writes each of them whole: with SQLite's usual 4 KiB
#: that was 90 KB for one sink. A file keeps the size that it was made with, and any version reads it.
PAGE_BYTES = 1024

_SUFFIXES = ("", "-wal", "-shm")
_DAMAGED = (
    "malformed",
    "not a database",
    "unsupported file format",
    "no such table",
    "no such column",
    "no such index",
    "encrypted",
    "could not decode",
    "corrupt",
)
_REFUSED = ("full", "readonly", "read-only", "disk i/o error", "unable to open", "authoriz")
_LOCKED = ("locked", "busy")


def load_statements() -> dict[str, str]:
    """Return queries.sql, name -> statement."""
    text = _read_sql("queries.sql")
    blocks = text.split("-- name: ")[1:]
    named = (block.partition("\n") for block in blocks)
    return {name.strip(): body.strip() for name, _, body in named}


def _read_sql(name: str) -> str:
    return files("bridge.outbox").joinpath(name).read_text(encoding="utf-8")


SQL = load_statements()
_ADDED_NAMES = frozenset(re.findall(r"^CREATE \w+ IF NOT EXISTS (\w+)", _read_sql("additions.sql"), re.MULTILINE))


def is_damage(error: Exception) -> bool:
    """Return whether *error* says that the file is no database of ours any more."""
    return isinstance(error, sqlite3.Error) and _says(error, _DAMAGED)


def is_lock(error: Exception) -> bool:
    """Return whether *error* says that another program writes just now."""
    return isinstance(error, sqlite3.Error) and not is_damage(error) and _says(error, _LOCKED)


def is_refusal(error: Exception) -> bool:
    """Return whether *error* says that the disk does not take writes, or gives no reads, for now."""
    return isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and _says(error, _REFUSED))


def is_full(error: Exception) -> bool:
    """Return whether *error* says that the disk has no room."""
    return isinstance(error, sqlite3.Error) and _says(error, ("full",))


def _says(error: Exception, words: tuple[str, ...]) -> bool:
    # By text: Python 3.10 does not hand on SQLite's error code.
    text = str(error).lower()
    return any(word in text for word in words)


class TrackedConnection(sqlite3.Connection):
    """A connection that notes a write to `meta`: the document there may be large, and most commits leave it alone."""

    meta_changed = True


def connect(path: Path, *, read_only: bool = False, timeout_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Return a connection to the database at *path*, set up for durable commits."""
    refuse_link(path)
    target = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    connection = sqlite3.connect(
        target,
        uri=True,
        isolation_level=None,
        timeout=timeout_seconds,
        check_same_thread=False,
        factory=TrackedConnection,
    )
    try:
        if not read_only:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            # FULL: the host may die right after a commit, and NORMAL can lose what was acknowledged.
            connection.execute("PRAGMA synchronous = FULL")
            wal = wal_bytes(path.parent)
            connection.execute(f"PRAGMA journal_size_limit = {wal}")
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
            connection.execute(f"PRAGMA wal_autocheckpoint = {wal // page_bytes}")
            # 1 MiB instead of 2: enough to rewrite a usual outbox from, should its file be damaged, and no more.
            connection.execute("PRAGMA cache_size = -1024")
        connection.execute("SELECT count(*) FROM sqlite_master")
    except BaseException:
        connection.close()
        raise
    return connection


def open_file(path: Path) -> sqlite3.Connection:
    """Return a connection to our database at *path*, made where there is none, that does take writes.

    Raise sqlite3.Error or OSError for what the disk or the file has against it, OutboxError for a newer schema.
    """
    is_made = _create_private(path)
    try:
        connection = connect(path)
        try:
            create_schema(connection)
            add_tables(connection)
            with suppress_lock():
                connection.execute("BEGIN IMMEDIATE")  # a read-only file opens without complaint, and refuses here
                connection.execute("ROLLBACK")
        except BaseException:
            connection.close()
            raise
    except BaseException:
        if is_made:
            with suppress(OSError):
                path.unlink()  # or this stump would be taken for an outbox that something cut off
        raise
    return connection


@contextmanager
def suppress_lock() -> Iterator[None]:
    """Ignore that another program writes just now."""
    try:
        yield
    except sqlite3.Error as error:
        if not is_lock(error):
            raise


def open_memory(*, empty: bool = False) -> sqlite3.Connection:
    """Return an outbox in memory without records; *empty*: without tables too."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    if not empty:
        create_schema(connection)
        add_tables(connection)
    return connection


def is_in_memory(connection: sqlite3.Connection) -> bool:
    """Return whether *connection* has no file, because the disk refuses."""
    return not any(file for _, name, file in connection.execute("PRAGMA database_list") if name == "main")


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return how much of the database is in use."""
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def create_schema(connection: sqlite3.Connection) -> None:
    """Create the tables where there are none; raise OutboxError for a file of a newer version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise OutboxError(
            f"The outbox was written by a newer version (schema {version}, this one knows {SCHEMA_VERSION}). "
            "Run that version, or move the state directory away to start empty."
        )
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE;\n{_read_sql('schema.sql')}\nCOMMIT;")


def add_tables(connection: sqlite3.Connection) -> None:
    """Make what additions.sql has and the file, of a version before, has not; writes nothing where all is there."""
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not found >= _ADDED_NAMES:
        connection.executescript(f"BEGIN IMMEDIATE;\n{_read_sql('additions.sql')}\nCOMMIT;")


def give_back(connection: sqlite3.Connection, *, most_pages: int) -> None:
    """Take up to *most_pages* free pages out of the database, which gets shorter by them."""
    free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
    for _ in range(min(free, most_pages)):
        connection.execute("PRAGMA incremental_vacuum(1)")  # Python ends it after one page, whatever number it is given


def cut_wal(connection: sqlite3.Connection) -> bool:
    """Move the -wal into the database and cut it off; return whether there was something to move, and all of it was."""
    with suppress(sqlite3.Error):  # on a full disk: the file itself may have to grow for it
        frames = int(connection.execute("PRAGMA wal_checkpoint").fetchone()[1])
        is_busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return frames > 0 and not is_busy
    return False


def check_wal(connection: sqlite3.Connection, path: Path, longest_bytes: int) -> None:
    """Raise sqlite3.OperationalError when the -wal of *path* is longer, and cannot be moved into the database now."""
    if file_bytes(wal_of(path)) > longest_bytes:
        _, frames, moved = connection.execute("PRAGMA wal_checkpoint").fetchone()
        if moved < frames:
            raise sqlite3.OperationalError("the disk is about to be full: a program reads the outbox for long")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what happens inside, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise sqlite3.DatabaseError when the file is damaged where that can be seen without an error."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(f"{path.name} is malformed: {verdict}")


def refuse_link(path: Path) -> None:
    """Raise sqlite3.OperationalError when *path* is a symbolic link, as for any file that cannot be opened."""
    if path.is_symlink():
        raise sqlite3.OperationalError(f"unable to open {path}: it is a symbolic link. Put the file itself there")


def refuse_emptied(path: Path) -> None:
    """Raise sqlite3.DatabaseError for an empty file: SQLite would take it for new, and delete the -wal beside it."""
    refuse_link(path)
    if path.exists() and path.stat().st_size == 0:
        raise sqlite3.DatabaseError(f"{path.name} is malformed: it is empty")


def _pad_emptied(path: Path) -> None:
    """Give an emptied file that was set aside a page of zeros: SQLite deletes the -wal of an empty one, unread."""
    with suppress(OSError):
        if path.lstat().st_size == 0:
            with Path(f"{path}-wal").open("rb") as wal:
                os.truncate(path, int.from_bytes(wal.read(12)[8:], "big"))


def open_to_read(path: Path | None) -> sqlite3.Connection | None:
    """Return a connection that reads the database at *path*, up to its last commit, or nothing."""
    if path is None or path.is_symlink() or not os.access(path, os.R_OK):
        return None
    with suppress(sqlite3.Error):
        return open_read_only(path)
    with suppress(sqlite3.Error):
        # Where no -shm can be made, and none is needed: an older state would be worse than none.
        if not Path(f"{path}-wal").exists() or Path(f"{path}-wal").stat().st_size == 0:
            return open_read_only(path, "mode=ro&immutable=1")
    return None


def open_read_only(path: Path, options: str = "mode=ro") -> sqlite3.Connection:
    """Return a connection that reads the database at *path*; raise sqlite3.Error when that cannot be had."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}", uri=True, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except BaseException:
        connection.close()
        raise
    return connection


def set_aside(path: Path, reason: str, moment: datetime) -> Path | None:
    """Rename the database with its -wal and -shm; return its new name, None when there was nothing or it failed."""
    stamp = moment.astimezone(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = path.with_name(f"{path.name}.{reason}-{stamp}")
    number = 1
    while any(os.path.lexists(f"{aside}{suffix}") for suffix in _SUFFIXES):
        number += 1
        aside = path.with_name(f"{path.name}.{reason}-{stamp}-{number}")
    for suffix in _SUFFIXES:
        with suppress(OSError):
            Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    if not aside.exists():
        return None
    _pad_emptied(aside)
    return aside


def is_in_the_way(path: Path) -> bool:
    """Return whether something of a database is still at *path*, that could not be renamed."""
    return any(os.path.lexists(f"{path}{suffix}") for suffix in _SUFFIXES)


def _create_private(path: Path) -> bool:
    """Create the file readable by its owner alone, since records name resources; return whether there was none."""
    with suppress(OSError):  # SQLite says next what is wrong, in words that are understood above
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        return True
    return False
