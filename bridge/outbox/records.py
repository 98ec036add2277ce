"""Writing records: from changes, heartbeats and approvals to transition records and a delivery for each sink.

One document is handled whole, in one transaction: the document, its records, one pending delivery for each (record,
sink that wants it). So a crash leaves either all of it or none, and with none the next poll sees it again, under the
same ids. Sequence, repeat and id are only known here: they depend on what the outbox already holds.

While this VM's identity was never known, a record is stored without sinks and without the VM it is about, since its
very id depends on it. When the identity comes, the record is completed, before any sink saw it, as if the identity had
been known all along. An identity that is stored may be another machine's: see `bridge.outbox.doubt`.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.clock import AgeClock, Clock, format_time, parse_time
from bridge.errors import StreamChanged
from bridge.events.diff import Change, is_over
from bridge.events.event import Document, Incarnation, ScheduledEvent, VmIdentity, encode, names_vm
from bridge.events.record import (
    Approval,
    Evidence,
    Transition,
    TransitionRecord,
    decode_record,
    record_id,
    transition_key,
    vm_key,
)
from bridge.outbox import approvals, deliveries, meta
from bridge.outbox.approvals import ApprovalRecord, DecisionUpdate, KeepResult, PendingApproval, StoredDecision
from bridge.outbox.database import SQL, transaction
from bridge.outbox.decision_limits import GivenUp, limit_decisions
from bridge.outbox.doubt import Doubt, forget_told, save_told, take_along, take_saved_along
from bridge.outbox.retention import enforce_size
from bridge.outbox.storage import Storage

if TYPE_CHECKING:
    from bridge.outbox.unloaded import StartHold, Taken

Router = Callable[[TransitionRecord, str | None], Iterable[str]]
"""From a record and this VM's name to the names of the sinks that want it.

One with a method ``if_told`` of the same shape names by it those that want the record only if they were told of its
event before, which ends with the end of the event.
"""

_Repeats = dict[str, int]
"""From an id without repeat to the first repeat that may be free, as found within one job.

It lives no longer than the job: what the next one finds may have been rolled back, deleted or carried in.
"""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One good answer that has to be stored, and what follows from it."""

    stream_id: str
    """The stream whose state the changes were derived from."""
    document: Document
    changes: Sequence[Change]
    observed_at: datetime
    incarnation: Incarnation
    previous_incarnation: Incarnation
    is_settled: bool
    """False: *observed_at* may not be stored as the time of a good answer."""
    boot_id: str


class _NewRecord(msgspec.Struct, frozen=True, kw_only=True):
    transition: Transition
    evidence: Evidence = Evidence.OBSERVED
    event: ScheduledEvent | None = None
    previous: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()
    observed_at: datetime
    incarnation: Incarnation
    previous_incarnation: Incarnation
    approval: Approval | None = None


class RecordWriter:
    """Writes records for one VM; only ever called on the outbox's thread, but for `await_identity`."""

    def __init__(self, *, now: Callable[[], datetime], ages: AgeClock | None = None) -> None:
        self._now = now
        self._ages = ages or AgeClock(Clock(now=now, monotonic=lambda: now().timestamp()))
        self._vm = VmIdentity()
        self._router: Router | None = None
        self._router_if_told: Router = _nobody
        self._sinks: tuple[str, ...] = ()
        self._labels: dict[str, str] = {}
        self._is_decided = False
        self._is_waiting = False
        self._doubt = Doubt()
        self.has_added = False
        """Whether deliveries may have been added since `take_added` was called last."""
        self._storage: Storage
        self.last_sequence = 0
        """The sequence of the newest record; a hint, it may be ahead of the commit."""
        self.hold: StartHold | None = None
        """What waits for the stored outbox while that is being loaded, and this one takes its place."""
        self.taken: Taken | None = None
        """What sinks took before this outbox was loaded."""
        self.boot_id = ""
        """What names the boot of this machine; "" where that is not known."""

    def open(self, storage: Storage) -> None:
        """Write to *storage*, from where its stream stands."""
        self._storage = storage
        self.last_sequence = int(storage.meta.get("next_sequence", "1")) - 1

    def begin(self, storage: Storage) -> None:
        """Write to *storage* from the start of the agent on, which may have died while it exchanged the database."""
        if not storage.in_memory and take_saved_along(storage.connection, storage.directory):
            storage.refresh()
        self.open(storage)

    @property
    def is_in_doubt(self) -> bool:
        """Return whether what is stored may be another machine's, so that nothing of it is to be told again."""
        return self._doubt.is_open

    @property
    def doubted_vm_name(self) -> str | None:
        """Return the name of the VM that is stored while it may be another's; what is stored is compared under it.

        What follows from that is only told when the name is right.
        """
        return self._doubt.vm_name

    def take_added(self) -> bool:
        """Return whether deliveries may have been added since this was asked last."""
        had_added, self.has_added = self.has_added, False
        return had_added

    # Records.

    def keep_decisions(
        self, connection: sqlite3.Connection, decisions: Sequence[StoredDecision], tokens: Sequence[str]
    ) -> tuple[list[KeepResult], list[GivenUp]]:
        """Keep *decisions* with their *tokens*, within the bounds of decisions and of the outbox.

        Return what was found of each, and the open ones, of these or from before, that do not count any more.
        """
        results = approvals.keep_decisions(connection, decisions, tokens)
        given_up = limit_decisions(connection, decisions, max_bytes=self._storage.max_bytes)
        self._enforce_size(connection, newest=self.last_sequence)
        return results, given_up

    def append_observation(self, connection: sqlite3.Connection, observation: Observation) -> list[TransitionRecord]:
        """Store the document and its records; raise StreamChanged when they follow from another stream."""
        if meta.get(connection, "stream_id") != observation.stream_id:
            raise StreamChanged("The outbox was started over; the document is compared anew.")
        meta.put(connection, "document", encode(observation.document).decode())
        if self.hold is not None:
            self.hold.begin(observation.document)
        if observation.is_settled:
            self.save_liveness(connection, last_good_at=observation.observed_at, boot_id=observation.boot_id)
        return self._append(connection, [_new_record(observation, change) for change in observation.changes])

    def append_observations(
        self, connection: sqlite3.Connection, observations: Iterable[Observation]
    ) -> list[TransitionRecord]:
        """Store several documents and their records, in order."""
        return [record for each in observations for record in self.append_observation(connection, each)]

    def save_liveness(self, connection: sqlite3.Connection, *, last_good_at: datetime, boot_id: str) -> None:
        """Store when IMDS last answered, and under which boot."""
        save = self._doubt.save_liveness if self._doubt.is_open else meta.save_liveness
        save(connection, last_good_at=last_good_at, boot_id=boot_id)

    def append_heartbeat(self, connection: sqlite3.Connection, *, incarnation: Incarnation) -> list[TransitionRecord]:
        """Add a heartbeat for the sinks that want it."""
        new = _NewRecord(
            transition=Transition.HEARTBEAT,
            observed_at=self._now(),
            incarnation=incarnation,
            previous_incarnation=incarnation,
        )
        return self._append(connection, [new])

    def append_outcomes(
        self, connection: sqlite3.Connection, outcomes: Iterable[ApprovalRecord], *, incarnation: Incarnation
    ) -> list[TransitionRecord]:
        """Add a record for each outcome of an approval, also while in memory."""
        moment = self._now()
        new_records = [
            _NewRecord(
                transition=outcome.transition,
                event=outcome.event,
                observed_at=moment,
                incarnation=incarnation,
                previous_incarnation=incarnation,
                approval=msgspec.structs.replace(
                    outcome.approval, jws_sha256=approvals.token_digests(connection, outcome.arrivals)
                ),
            )
            for outcome in outcomes
        ]
        return self._append(connection, new_records)

    def append_off_switch(
        self, connection: sqlite3.Connection, outcome: ApprovalRecord, owner: str, *, incarnation: Incarnation
    ) -> list[TransitionRecord]:
        """Add the record *outcome* of ``approvals.disabled``, and remember that *owner* of the file was told."""
        meta.put(connection, meta.DISABLED_BY, owner)
        return self.append_outcomes(connection, [outcome], incarnation=incarnation)

    def write_approvals(
        self,
        connection: sqlite3.Connection,
        stream_id: str,
        *,
        pending: Sequence[PendingApproval] = (),
        decisions: Sequence[DecisionUpdate] = (),
        outcomes: Sequence[ApprovalRecord] = (),
        incarnation: Incarnation,
    ) -> list[TransitionRecord]:
        """Write what became of approvals, and its records, in one transaction. OutboxReadOnly while in memory."""
        approvals.write_changes(connection, stream_id, approvals=pending, decisions=decisions)
        return self.append_outcomes(connection, outcomes, incarnation=incarnation)

    # Which sinks get them.

    def configure(
        self, connection: sqlite3.Connection, router: Router, sinks: Collection[str], *, labels: dict[str, str]
    ) -> None:
        """Route by *router* from now on; give sinks seen for the first time the last record of each active event."""
        self._router, self._sinks, self._labels = router, tuple(sinks), labels
        self._router_if_told = getattr(router, "if_told", _nobody)
        known = {name for (name,) in connection.execute(SQL["known_sinks"])}
        new = [name for name in sinks if name not in known]
        self._add_sinks(connection)
        self._route_waiting(connection)
        saved = meta.read_meta(connection)
        vm = meta.vm_of(saved) if self._vm.name is None else None
        vm_name = self._vm.name if vm is None else vm.name
        for record in _last_of_active(connection, saved) if new else ():
            for name in router(record, vm_name):
                if name in new and not self._has_later_news(name, record):
                    self._add_delivery(connection, name, record)
        self._doubt.hold(connection)

    def _has_later_news(self, sink: str, record: TransitionRecord) -> bool:
        """Return whether *sink* was told of the event before this outbox was loaded, which knows it from before."""
        return self.taken is not None and (sink, record.event_key) in self.taken.told

    def await_identity(self) -> None:
        """Let records wait for `identify`: this VM's name was never known."""
        self._is_waiting = True

    def distrust_stored(self, connection: sqlite3.Connection, vm: VmIdentity) -> None:
        """Let what is stored wait for `identify`: it may have come with another machine's image.

        Records wait too, unless *vm*, which is what is configured, has a name.
        """
        last_sequence = int(meta.get(connection, "next_sequence") or 1) - 1
        self._doubt.begin(connection, last_sequence=last_sequence, boot_id=self.boot_id)
        self._vm, self._is_waiting = vm, vm.name is None
        if not self._is_waiting:
            self.stop_waiting(connection)

    def reset_if_foreign(self, storage: Storage, vm: VmIdentity) -> bool:
        """Start over when the outbox belongs to another machine: it came with an image; return whether it did."""
        before = meta.vm_id_of(storage.meta)
        if not vm.vm_id or before is None or before == vm.vm_id.lower():
            return False
        why = f"it belongs to vmId {before}, this machine is {vm.vm_id}"
        self._doubt.resume(storage.connection, boot_id=self.boot_id)
        told = self._doubt.told(storage.connection)
        save_told(storage.directory, told, stream_id=storage.meta["stream_id"])
        storage.replace_database("other-vm", carry=False, why=why)
        with transaction(storage.connection):
            self._doubt.end(storage.connection)
            take_along(storage.connection, told)
        storage.refresh()
        forget_told(storage.directory)
        return True

    def identify(self, connection: sqlite3.Connection, vm: VmIdentity) -> None:
        """Take *vm* as this machine, for good, and route the records that waited for it."""
        self._vm = vm
        self._doubt.end(connection)
        self.has_added = True  # what waited in doubt is due
        meta.save_vm(connection, vm)
        self._add_sinks(connection)
        self.stop_waiting(connection)

    def stop_waiting(self, connection: sqlite3.Connection) -> None:
        """Go on with the identity as it is known, if at all."""
        self._is_waiting, self._is_decided = False, True
        self._route_waiting(connection)

    def end_hold(self, connection: sqlite3.Connection) -> None:
        """Let go of what waits for the stored outbox: it takes too long."""
        self.hold = None
        self._route_waiting(connection)

    def catch_up(self, connection: sqlite3.Connection) -> None:
        """Look at what another database holds: sinks it had not seen, records that waited there, deliveries."""
        self._add_sinks(connection)
        self._doubt.hold(connection)
        self._route_waiting(connection)
        self.has_added = True

    def _add_sinks(self, connection: sqlite3.Connection) -> None:
        for name in self._sinks:
            connection.execute(SQL["add_sink"], (name,))

    def _route_waiting(self, connection: sqlite3.Connection) -> None:
        """Choose the sinks of records that wait, once both this VM's identity and the sinks are known."""
        if self._router is None or not self._is_decided:
            return
        repeats: _Repeats = {}
        for sequence, body in connection.execute(SQL["unrouted"]).fetchall():
            waiting = decode_record(body)
            if self._withholds(waiting):
                continue
            record, first_id = self._with_identity(connection, waiting, repeats)
            text = encode(record).decode()
            connection.execute(SQL["route_record"], (record.id, first_id, text, sequence))
            self._route(connection, record)

    def _withholds(self, record: TransitionRecord) -> bool:
        return self._doubt.withholds(record) or (self.hold is not None and self.hold.withholds(record))

    def _with_identity(
        self, connection: sqlite3.Connection, record: TransitionRecord, repeats: _Repeats
    ) -> tuple[TransitionRecord, str]:
        """Return *record* with this VM and the ids that follow from it, and its id without repeat."""
        vm, event = self._vm, record.event
        named = msgspec.structs.replace(record, vm=vm, affects_this_vm=names_vm(event, vm.name))
        if event is None:
            return named, named.id
        first_id = _id(named, repeat=0)
        own_id, repeat = _first_free(connection, named, first_id, repeats)
        key = transition_key(event.key, named.transition, event, n=repeat)
        return msgspec.structs.replace(named, id=own_id, transition_key=key), first_id

    def _append(self, connection: sqlite3.Connection, new_records: Sequence[_NewRecord]) -> list[TransitionRecord]:
        """Store *new_records* at the end of the stream, with their deliveries, within the outbox's bounds."""
        if not new_records:
            return []
        stream_id = meta.get(connection, "stream_id") or ""
        first = int(meta.get(connection, "next_sequence") or 1)
        repeats: _Repeats = {}
        records = [
            self._add(connection, self._record(new, stream_id=stream_id, sequence=sequence), repeats)
            for sequence, new in enumerate(new_records, first)
        ]
        self.last_sequence = records[-1].sequence
        meta.put(connection, "next_sequence", str(self.last_sequence + 1))
        self._enforce_size(connection, newest=first)
        return records

    def _enforce_size(self, connection: sqlite3.Connection, *, newest: int) -> None:
        enforce_size(
            connection,
            max_bytes=self._storage.max_bytes,
            disk_sequence=self._storage.disk_sequence,
            now=self._now().timestamp(),
            newest=newest,
        )

    def _add(self, connection: sqlite3.Connection, unnamed: TransitionRecord, repeats: _Repeats) -> TransitionRecord:
        record, first_id = self._with_identity(connection, unnamed, repeats)
        as_told = None if self.taken is None else self.taken.ending_as_told(record)
        if as_told is not None and connection.execute(SQL["has_id"], (as_told.id, record.sequence)).fetchone() is None:
            record, first_id = self._with_identity(connection, as_told, repeats)
        is_released = self.hold is not None and self.hold.releases(record)
        waits = self._withholds(record) or self._is_waiting
        arguments = (
            record.sequence,
            record.id,
            first_id,
            record.event_key,
            parse_time(record.observed_at).timestamp(),
            not waits,
            encode(record).decode(),
        )
        connection.execute(SQL["add_record"], arguments)
        if not waits:
            self._route(connection, record)
            if is_released:  # what waited of its event goes before it
                self._route_waiting(connection)
        return record

    def _record(self, new: _NewRecord, *, stream_id: str, sequence: int) -> TransitionRecord:
        """Return *new* as a record. Without an event its place in the stream names it; else it has no ids yet."""
        own_name = f"{stream_id}/{sequence}"
        event = new.event
        notice = None if event is None or event.not_before is None else event.not_before - new.observed_at
        return TransitionRecord(
            id=str(uuid.uuid5(uuid.UUID(stream_id), own_name)) if event is None else "",
            transition_key=transition_key(own_name, new.transition, None, n=0) if event is None else "",
            stream_id=stream_id,
            sequence=sequence,
            transition=new.transition,
            evidence=new.evidence,
            observed_at=format_time(new.observed_at),
            incarnation=new.incarnation,
            previous_incarnation=new.previous_incarnation,
            event=event,
            previous=new.previous,
            changed=new.changed,
            notice_seconds=None if notice is None else round(notice.total_seconds(), 3),
            affects_this_vm=None,
            vm=self._vm,
            labels=self._labels,
            approval=new.approval,
        )

    def _route(self, connection: sqlite3.Connection, record: TransitionRecord) -> None:
        for name in () if self._router is None else self._router(record, self._vm.name):
            self._add_delivery(connection, name, record)
        for name in self._router_if_told(record, self._vm.name):
            if _was_told(connection, name, record):
                self._add_delivery(connection, name, record)
        if record.is_urgent:
            # Its older records go before it, so they are as urgent.
            made_urgent = connection.execute(SQL["make_event_urgent"], (record.event_key,)).rowcount
            self.has_added = self.has_added or made_urgent > 0

    def _add_delivery(self, connection: sqlite3.Connection, sink: str, record: TransitionRecord) -> None:
        event = record.event
        not_before = None if event is None or event.not_before is None else event.not_before.timestamp()
        observed_at = parse_time(record.observed_at).timestamp()
        aged_from = self._ages.at(observed_at)
        arguments = (sink, record.sequence, record.event_key, record.is_urgent, not_before, aged_from, observed_at)
        connection.execute(SQL["add_delivery"], arguments)
        if self.taken is not None and sink in self.taken.sinks.get(record.id, ()):
            deliveries.note_delivered(connection, sink, record.sequence, now=self._ages.timestamp())
        self.has_added = True


def _nobody(_record: TransitionRecord, _vm_name: str | None) -> Iterable[str]:
    return ()


def _was_told(connection: sqlite3.Connection, sink: str, record: TransitionRecord) -> bool:
    """Return whether *sink* was told of the record's event, or will be, but for approvals, and not yet of its end."""
    row = connection.execute(SQL["was_told"], (sink, record.event_key, record.sequence)).fetchone()
    return row is not None and bool(row[0])


def _last_of_active(connection: sqlite3.Connection, saved: Mapping[str, str]) -> list[TransitionRecord]:
    document = meta.document_of(saved)
    events = () if document is None else document.events
    keys = dict.fromkeys(event.key for event in events if not is_over(event))
    return [record for key in keys for record in _last_of_event(connection, key)]


def _last_of_event(connection: sqlite3.Connection, event_key: str) -> list[TransitionRecord]:
    """Return the last record; where that is an approval's outcome, before it the one that says how the event stands."""
    row = connection.execute(SQL["last_of_event"], (event_key,)).fetchone()
    if row is None:
        return []
    last = decode_record(row[0])
    life = None if last.approval is None else connection.execute(SQL["newest_of_life"], (event_key,)).fetchone()
    return [last] if life is None else [decode_record(life[2]), last]


def _new_record(observation: Observation, change: Change) -> _NewRecord:
    return _NewRecord(
        transition=change.transition,
        evidence=change.evidence,
        event=change.event,
        previous=change.previous,
        changed=change.changed,
        observed_at=observation.observed_at,
        incarnation=observation.incarnation,
        previous_incarnation=observation.previous_incarnation,
    )


def _first_free(
    connection: sqlite3.Connection, record: TransitionRecord, first_id: str, repeats: _Repeats
) -> tuple[str, int]:
    """Return an id for *record* that no other record has, and the repeat in it.

    What the outbox has of *first_id* is counted once in a job, in *repeats* from then on: counting for every record is
    quadratic when thousands are alike.
    """
    repeat = repeats.get(first_id)
    if repeat is None:
        (repeat,) = connection.execute(SQL["repeats"], (first_id, record.sequence)).fetchone()
    while True:
        candidate = first_id if repeat == 0 else _id(record, repeat=repeat)
        if connection.execute(SQL["has_id"], (candidate, record.sequence)).fetchone() is None:
            break
        repeat += 1
    repeats[first_id] = repeat + 1
    return candidate, repeat


def _id(record: TransitionRecord, *, repeat: int) -> str:
    return record_id(
        vm_key=vm_key(record.vm),
        event_key=record.event_key,
        transition=record.transition,
        event=record.event,
        n=repeat,
        outcome=None if record.approval is None else (record.approval.decision_id or "", record.approval.result),
    )
