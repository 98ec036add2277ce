"""Doubt: what is stored may be another machine's, which came with an image, until this VM's identity is known again.

Meanwhile nothing is told that rests on it: what was pending at the start waits, and so do the ends of events that only
the stored document knows. What this machine's own document shows is told as that of an unknown VM. When the identity
proves to be the stored one, all of it goes on in its order; when it does not, the database is set aside, and what was
already told of this machine's events, or waits to be, goes along into the new one, so that it is not told again. Where
the doubt began is stored: what was told since is this machine's after a restart too. An agent may die between the two
databases, so what goes along is in a file of its own meanwhile (`save_told`).

The events whose rows wait are in a table ``held`` of the connection's own, which stands before the one of the file for
the statements that choose what is due. It is gone with the process, however that ends.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec

from bridge.events.event import Document, encode
from bridge.events.record import TransitionRecord, decode_record
from bridge.outbox import meta
from bridge.outbox.database import SQL, transaction
from bridge.system.boot import boot_id as current_boot_id
from bridge.system.boot import has_booted

Row = tuple[object, ...]
_TOLD_FILE = "told.json"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What was told in doubt, or is to be: records with their rows, and the start marks of their events."""

    records: list[Row] = []
    deliveries: list[Row] = []
    marks: list[Row] = []
    next_sequence: str | None = None


class _SavedTold(msgspec.Struct, frozen=True, kw_only=True):
    """What was told, on its way from one database to the next; kept as JSON under these names."""

    boot_id: str
    stream_id: str
    """The stream of the database that is set aside."""
    told: Told


class Doubt:
    """The doubt about one database, from `begin` to `end`; for the outbox's thread."""

    def __init__(self) -> None:
        self._through: int | None = None
        """The last sequence of what may be another machine's; None: there is no doubt."""
        self._known: frozenset[str] = frozenset()
        self._withheld: set[str] = set()
        self.vm_name: str | None = None
        """The name of the VM that is stored."""

    @property
    def is_open(self) -> bool:
        """Return whether what is stored may be another machine's."""
        return self._through is not None

    def begin(self, connection: sqlite3.Connection, *, last_sequence: int, boot_id: str) -> None:
        """Doubt all that *connection* has now, or had when the doubt began that is open since, in this same boot."""
        saved = meta.read_meta(connection)
        mark = meta.doubt_of(saved)
        if mark is None or has_booted(mark.boot_id, boot_id):
            document = meta.document_of(saved)
            known = tuple(event.key for event in (document.events if document else ()))
            good_at = saved.get("last_good_at")
            mark = meta.DoubtMark(through=last_sequence, known=known, stored_good_at=good_at, boot_id=boot_id)
            meta.put(connection, meta.DOUBT, encode(mark).decode())
        self.resume(connection, boot_id=boot_id)
        self.hold(connection)

    def resume(self, connection: sqlite3.Connection, *, boot_id: str) -> None:
        """Go on with the doubt that is open in *connection*, if one is that began in this boot."""
        saved = meta.read_meta(connection)
        mark, vm = meta.doubt_of(saved), meta.vm_of(saved)
        if mark is None or has_booted(mark.boot_id, boot_id):
            return
        self._through, self._known = mark.through, frozenset(mark.known)
        self.vm_name = None if vm is None else vm.name
        for _, body in connection.execute(SQL["unrouted"]):
            self.withholds(decode_record(body))

    @staticmethod
    def save_liveness(connection: sqlite3.Connection, *, last_good_at: datetime, boot_id: str) -> None:
        """Store when IMDS last answered this machine, and under which boot, beside what may be another's."""
        mark = meta.doubt_of(meta.read_meta(connection))
        if mark is not None:
            mark = msgspec.structs.replace(mark, last_good_at=last_good_at, boot_id=boot_id)
            meta.put(connection, meta.DOUBT, encode(mark).decode())

    def hold(self, connection: sqlite3.Connection) -> None:
        """Let what is pending of before wait; again after another connection, or another sink, has come."""
        if self._through is not None:
            self._drop_hold(connection)
            connection.execute(SQL["hold"])
            connection.execute(SQL["hold_left_on_disk"])
            connection.execute(SQL["hold_pending"], (self._through,))

    def end(self, connection: sqlite3.Connection) -> None:
        """Go on with what is stored: it is this machine's."""
        saved = meta.read_meta(connection)
        mark = meta.doubt_of(saved)
        if mark is not None and mark.last_good_at is not None:
            meta.save_liveness(connection, last_good_at=mark.last_good_at, boot_id=mark.boot_id)
        if saved.get(meta.DOUBT):
            meta.put(connection, meta.DOUBT, "")
        self._through = self.vm_name = None
        self._known = frozenset()
        self._withheld.clear()
        self._drop_hold(connection)

    def withholds(self, record: TransitionRecord) -> bool:
        """Return whether *record* waits for the identity: it was there before, or it follows from what was."""
        if self._through is None:
            return False
        key = record.event_key
        if key in self._known and record.transition.is_ending:
            self._withheld.add(key)
        return record.sequence <= self._through or key in self._withheld

    def told(self, connection: sqlite3.Connection) -> Told:
        """Return what was told since `begin`, or waits to be, as far as it can be read.

        But for what waits of an event that was known before: what changed is not sure, and is found again.
        """
        if self._through is None:
            return Told()
        with suppress(sqlite3.Error):
            after = (self._through,)
            found = connection.execute(SQL["records_after"], after).fetchall()
            rows = [row for row in found if row[5] or row[3] not in self._known]
            keys = {row[3] for row in rows}
            return Told(
                records=rows,
                deliveries=connection.execute(SQL["deliveries_after"], after).fetchall(),
                marks=[row for row in connection.execute(SQL["copy_start_marks"]) if row[1] in keys],
                next_sequence=meta.get(connection, "next_sequence"),
            )
        return Told()

    @staticmethod
    def _drop_hold(connection: sqlite3.Connection) -> None:
        connection.execute(SQL["drop_hold"])


def take_along(connection: sqlite3.Connection, told: Told) -> None:
    """Write *told* into another stream, inside its transaction.

    The sequences stay, and go on from there: what is being sent just now is noted under them.
    """
    if told.next_sequence is None:
        return
    meta.put(connection, "next_sequence", told.next_sequence)
    if not told.records:
        return
    stream_id = meta.get(connection, "stream_id") or ""
    events = {}
    for sequence, own_id, first_id, key, observed_at, is_routed, body in told.records:
        record = msgspec.structs.replace(decode_record(str(body)), stream_id=stream_id)
        text = encode(record).decode()
        connection.execute(SQL["paste_record"], (sequence, own_id, first_id, key, observed_at, is_routed, text))
        if record.event is not None:
            events[record.event_key] = None if record.transition.is_ending else record.event
    connection.executemany(SQL["paste_delivery"], told.deliveries)
    connection.executemany(SQL["add_start_mark"], told.marks)
    shown = tuple(event for event in events.values() if event is not None)
    meta.put(connection, "document", encode(Document(events=shown)).decode())


def save_told(directory: Path, told: Told, *, stream_id: str) -> None:
    """Store *told* of the stream *stream_id* in a file of *directory*, for good, if the disk allows it."""
    if not told.records:
        return
    text = msgspec.json.encode(_SavedTold(boot_id=current_boot_id(), stream_id=stream_id, told=told))
    with suppress(OSError):
        forget_told(directory)
        descriptor = os.open(directory / _TOLD_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)


def forget_told(directory: Path) -> None:
    """Delete what `save_told` stored."""
    with suppress(OSError):
        (directory / _TOLD_FILE).unlink()


def take_saved_along(connection: sqlite3.Connection, directory: Path) -> bool:
    """Take along what an agent had saved that died between two databases; return whether there was such."""
    try:
        descriptor = os.open(directory / _TOLD_FILE, os.O_RDONLY | _NO_LINK)
    except OSError:
        return False
    is_taken = False
    with suppress(OSError, msgspec.MsgspecError), os.fdopen(descriptor, "rb") as file:
        saved = msgspec.json.decode(file.read(), type=_SavedTold)
        known = meta.read_meta(connection)
        is_before = saved.stream_id == known.get("stream_id")  # it died before the exchange: all of it is still there
        is_after = meta.next_sequence(known) >= int(saved.told.next_sequence or 1)
        if not (is_before or is_after or has_booted(saved.boot_id, current_boot_id())):
            with transaction(connection):
                take_along(connection, saved.told)
            is_taken = True
    forget_told(directory)
    return is_taken
