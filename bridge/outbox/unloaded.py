"""An outbox in memory for an agent whose own is still being loaded: what may be told meanwhile, and what was.

A disk that hangs, or a large file that is damaged, can keep the outbox for as long as it likes; polls do not wait for
it. What the outbox holds is not known until then: of an event that the first document showed, the agent before may have
told all there is. So such an event waits (`StartHold`), unless it is urgent or near; what comes up later is told at
once. Nothing of this memory is written to the disk: once the outbox is loaded, the documents that were seen meanwhile
are compared with what it knows, in their order. That gives the same ids, and what a sink took under one of them counts
as delivered (`Taken`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path

import msgspec

from bridge.clock import AgeClock, parse_time, utc_now
from bridge.events.event import Document
from bridge.events.record import Transition, TransitionRecord, decode_record
from bridge.outbox import database, deliveries, meta
from bridge.outbox.database import SQL
from bridge.outbox.outbox import Outbox
from bridge.outbox.storage import Storage

#: An event whose NotBefore is so near does not wait for the outbox: half a minute later it may have begun.
_NEAR_SECONDS = 60.0


class UnloadedStorage(Storage):
    """A storage in memory that touches no disk, since nothing is known of it yet; it begins a stream of its own."""

    def __init__(self, directory: Path, *, max_bytes: int, now: Callable[[], datetime] = utc_now) -> None:
        self._begun_at = now()
        super().__init__(directory, max_bytes=max_bytes, now=now)

    def _open(self) -> sqlite3.Connection:
        self.in_memory = True
        memory = database.open_memory()
        meta.begin_stream(memory, self._begun_at)
        return memory

    def _begin_work(self) -> None:
        self._read_meta()

    def _look_at_volume(self) -> None:
        pass

    def return_to_disk(self) -> bool:
        """Return False: what is here is not written to the disk, but found again from the documents."""
        return False

    def replace_database(self, reason: str, *, carry: bool, why: str) -> None:
        """Do nothing: there is no file, and nothing of another machine."""

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class StartHold:
    """The events that wait for the outbox; for the outbox's thread."""

    def __init__(self) -> None:
        self._held: set[str] | None = None

    def begin(self, document: Document) -> None:
        """Hold every event of *document*, if it is the first one."""
        if self._held is None:
            self._held = {event.key for event in document.events}

    def releases(self, record: TransitionRecord) -> bool:
        """Let the event of *record* go when it cannot wait; return whether it had waited until now."""
        if not self.withholds(record) or not _cannot_wait(record):
            return False
        self._held = (self._held or set()) - {record.event_key}
        return True

    def withholds(self, record: TransitionRecord) -> bool:
        """Return whether *record* waits: the stored outbox may know its event."""
        return record.event is not None and record.event_key in (self._held or ())


def _cannot_wait(record: TransitionRecord) -> bool:
    """Return whether *record* tells this VM, as far as is known, of what is urgent, near, or began just now."""
    if record.affects_this_vm is False:
        return False
    event = record.event
    not_before = None if event is None else event.not_before
    seconds = None if not_before is None else (not_before - parse_time(record.observed_at)).total_seconds()
    is_near = seconds is not None and seconds <= _NEAR_SECONDS
    has_begun = record.transition is Transition.STARTED and record.previous is not None
    return record.is_urgent or is_near or has_begun


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What sinks took from an unloaded outbox."""

    sinks: Mapping[str, Collection[str]] = {}
    """From the id of a record to the sinks that took it; of every record that was seen, whether one took it or not."""
    start_marks: list[tuple[str, str]] = []
    """(sink, event key): of this event something may have reached this sink."""
    told: frozenset[tuple[str, str]] = frozenset()
    """(sink, event key): of this event the sink took something."""
    endings: Mapping[str, TransitionRecord] = {}
    """From the key of an event to how sinks were told that it ended, the last time."""

    def ending_as_told(self, record: TransitionRecord) -> TransitionRecord | None:
        """Return *record*, an ending, in the words in which sinks heard of it already; None when they are its own.

        They differ where documents between the two were too many to be kept: what was seen to complete is only gone.
        """
        told = self.endings.get(record.event_key) if record.transition.is_ending else None
        if told is None or record.id in self.sinks:
            return None
        place = {name: getattr(record, name) for name in ("stream_id", "sequence", "vm", "affects_this_vm", "labels")}
        return msgspec.structs.replace(told, **place)


def open_unloaded(directory: Path, *, max_bytes: int, keep_delivered_seconds: float, ages: AgeClock) -> Outbox:
    """Return an outbox in memory alone, in place of the one in *directory*."""
    outbox = Outbox(
        directory,
        max_bytes=max_bytes,
        keep_delivered_seconds=keep_delivered_seconds,
        ages=ages,
        open_storage=lambda: UnloadedStorage(directory, max_bytes=max_bytes),
    )
    outbox.records.hold = StartHold()
    return outbox


def read_taken(connection: sqlite3.Connection) -> Taken:
    """Return what sinks took."""
    sinks: dict[str, set[str]] = {}
    for record_id, sink in connection.execute(SQL["taken_by"]):
        names = sinks.setdefault(record_id, set())
        if sink is not None:
            names.add(sink)
    endings = (decode_record(body) for (body,) in connection.execute(SQL["told_endings"]))
    return Taken(
        sinks=sinks,
        endings={ending.event_key: ending for ending in endings},
        start_marks=connection.execute(SQL["copy_start_marks"]).fetchall(),
        told=frozenset(connection.execute(SQL["told_events"]).fetchall()),
    )


def keep_taken(
    connection: sqlite3.Connection, taken: Taken, *, now: float, skipping: Collection[str] = frozenset()
) -> None:
    """Keep the start marks of *taken*, and count what is pending as delivered where the sink took it.

    What is stored of an event, and still owed to one of *skipping* that has heard later news of it, is given up: an
    alert that has ended would be opened again, and nothing would end it.
    """
    connection.executemany(SQL["add_start_mark"], taken.start_marks)
    for record_id, sinks in taken.sinks.items():
        for (sequence,) in connection.execute(SQL["sequence_of"], (record_id,)).fetchall():
            for sink in sinks:
                deliveries.note_delivered(connection, sink, sequence, now=now)
    for sink, event_key in taken.told:
        if sink in skipping:
            deliveries.supersede(connection, sink, event_key, now=now)
