"""Turning changes into records, inside the transaction that stores them.

Sequence, repeat and id are only known here: they depend on what the outbox already holds. While `is_waiting`, a record
is stored without sinks and without the VM it is about; when the identity comes it is completed, before any sink saw
it, as if the identity had been known all along.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from bridge.clock import format_time, parse_time
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
from bridge.outbox.approvals import Outcome
from bridge.outbox.meta import document_of, get, put, read_meta, remember_liveness, remember_vm, vm_id_of, vm_of
from bridge.outbox.retention import enforce_size
from bridge.outbox.storage import SQL, Storage

Router = Callable[[TransitionRecord, str | None], Iterable[str]]
"""From a record and this VM's name to the names of the sinks that want it."""

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


class _Draft(msgspec.Struct, frozen=True, kw_only=True):
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
    """Writes records for one VM; only ever called on the outbox's thread, but for `is_waiting`."""

    def __init__(self, *, now: Callable[[], datetime]) -> None:
        self._now = now
        self._vm = VmIdentity()
        self._router: Router | None = None
        self._sinks: tuple[str, ...] = ()
        self._labels: dict[str, str] = {}
        self._is_decided = False
        self.is_waiting = False
        self.last_sequence = 0
        """The sequence of the newest record; a hint, it may be ahead of the commit."""

    def open(self, store: Storage) -> None:
        """Look where the stream stands."""
        self.last_sequence = int(store.meta.get("next_sequence", "1")) - 1

    def commit(self, store: Storage, observation: Observation) -> list[TransitionRecord]:
        """Store the document and its records; raise StreamChanged when they follow from another stream."""
        if get(store.connection, "stream_id") != observation.stream_id:
            raise StreamChanged("The outbox was started over; the document is compared anew.")
        put(store.connection, "document", encode(observation.document).decode())
        if observation.is_settled:
            remember_liveness(store.connection, observation.observed_at, observation.boot_id)
        repeats: _Repeats = {}
        records = [self._add(store, _draft(observation, change), repeats) for change in observation.changes]
        if records:
            enforce_size(store, now=self._now().timestamp(), newest=records[0].sequence)
        return records

    def heartbeat(self, store: Storage, incarnation: Incarnation) -> list[TransitionRecord]:
        """Add a heartbeat."""
        moment = self._now()
        draft = _Draft(
            transition=Transition.HEARTBEAT,
            observed_at=moment,
            incarnation=incarnation,
            previous_incarnation=incarnation,
        )
        records = [self._add(store, draft, {})]
        enforce_size(store, now=moment.timestamp(), newest=records[0].sequence)
        return records

    def outcomes(self, store: Storage, outcomes: Iterable[Outcome], incarnation: Incarnation) -> list[TransitionRecord]:
        """Add a record for each outcome of an approval."""
        moment = self._now()
        repeats: _Repeats = {}
        records = [
            self._add(
                store,
                _Draft(
                    transition=outcome.transition,
                    event=outcome.event,
                    observed_at=moment,
                    incarnation=incarnation,
                    previous_incarnation=incarnation,
                    approval=outcome.approval,
                ),
                repeats,
            )
            for outcome in outcomes
        ]
        if records:
            enforce_size(store, now=moment.timestamp(), newest=records[0].sequence)
        return records

    def configure(self, store: Storage, router: Router, sinks: Collection[str], labels: dict[str, str]) -> None:
        """Route by *router*; give sinks seen for the first time the last record of each active event."""
        self._router, self._sinks, self._labels = router, tuple(sinks), labels
        known = {name for (name,) in store.connection.execute(SQL["known_sinks"])}
        new = [name for name in sinks if name not in known]
        self._name_sinks(store)
        self._route_waiting(store)
        vm = vm_of(read_meta(store.connection)) if self._vm.name is None else None
        vm_name = self._vm.name if vm is None else vm.name
        for record in self._last_of_active(store) if new else ():
            for name in router(record, vm_name):
                if name in new:
                    self._owe(store, name, record)

    def leave_foreign(self, store: Storage, vm: VmIdentity) -> bool:
        """Start over when the outbox belongs to another machine: it came with an image; return whether it did."""
        before = vm_id_of(store.meta)
        if not vm.vm_id or before is None or before == vm.vm_id.lower():
            return False
        why = f"it belongs to vmId {before}, this machine is {vm.vm_id}"
        store.start_over("other-vm", carry=False, why=why)
        return True

    def identify(self, store: Storage, vm: VmIdentity) -> None:
        """Take *vm* as this machine, for good, and send off what waited for it."""
        self._vm = vm
        remember_vm(store.connection, vm)
        self._name_sinks(store)
        self.stop_waiting(store)

    def stop_waiting(self, store: Storage) -> None:
        """Go on with the identity as it is known, if at all."""
        self.is_waiting, self._is_decided = False, True
        self._route_waiting(store)

    def catch_up(self, store: Storage) -> None:
        """Look at what came back with the disk: sinks it had not seen, records that waited there."""
        self._name_sinks(store)
        self._route_waiting(store)

    def _name_sinks(self, store: Storage) -> None:
        for name in self._sinks:
            store.connection.execute(SQL["add_sink"], (name,))

    def _route_waiting(self, store: Storage) -> None:
        """Choose the sinks of what waits, once it is known both who this VM is and which sinks there are."""
        if self._router is None or not self._is_decided:
            return
        repeats: _Repeats = {}
        for sequence, body in store.connection.execute(SQL["unrouted"]).fetchall():
            record = self._addressed(store, decode_record(body), repeats)
            first_id = _id(record, repeat=0)
            text = encode(record).decode()
            store.connection.execute(SQL["route_record"], (record.id, first_id, text, sequence))
            self._route(store, record)

    def _addressed(self, store: Storage, record: TransitionRecord, repeats: _Repeats) -> TransitionRecord:
        """Return *record* with this VM and the id that follows from it."""
        vm = self._vm
        named = msgspec.structs.replace(record, vm=vm, affects_this_vm=names_vm(record.event, vm.name))
        if named.event is None:
            return named
        repeat = _repeat(store, named, repeats)
        return msgspec.structs.replace(named, id=_id(named, repeat=repeat), transition_key=_key(named, repeat=repeat))

    def _add(self, store: Storage, draft: _Draft, repeats: _Repeats) -> TransitionRecord:
        sequence = int(get(store.connection, "next_sequence") or 1)
        put(store.connection, "next_sequence", str(sequence + 1))
        self.last_sequence = sequence
        stream_id = get(store.connection, "stream_id") or ""
        record = self._addressed(store, self._record(draft, stream_id=stream_id, sequence=sequence), repeats)
        arguments = (
            sequence,
            record.id,
            _id(record, repeat=0),
            record.event_key,
            draft.observed_at.timestamp(),
            not self.is_waiting,
            encode(record).decode(),
        )
        store.connection.execute(SQL["add_record"], arguments)
        if not self.is_waiting:
            self._route(store, record)
        return record

    def _record(self, draft: _Draft, *, stream_id: str, sequence: int) -> TransitionRecord:
        # A record without an event is like no other: its place in the stream names it.
        own_name = f"{stream_id}/{sequence}"
        event = draft.event
        notice = None if event is None or event.not_before is None else event.not_before - draft.observed_at
        return TransitionRecord(
            id=str(uuid.uuid5(uuid.UUID(stream_id), own_name)),
            transition_key=transition_key(own_name, draft.transition, None),
            stream_id=stream_id,
            sequence=sequence,
            transition=draft.transition,
            evidence=draft.evidence,
            observed_at=format_time(draft.observed_at),
            incarnation=draft.incarnation,
            previous_incarnation=draft.previous_incarnation,
            event=event,
            previous=draft.previous,
            changed=draft.changed,
            notice_seconds=None if notice is None else round(notice.total_seconds(), 3),
            affects_this_vm=None,
            vm=self._vm,
            labels=self._labels,
            approval=draft.approval,
        )

    def _route(self, store: Storage, record: TransitionRecord) -> None:
        for name in () if self._router is None else self._router(record, self._vm.name):
            self._owe(store, name, record)
        if record.is_urgent:
            # Its older records go before it, so they are as urgent.
            store.connection.execute(SQL["make_event_urgent"], (record.event_key,))

    def _owe(self, store: Storage, sink: str, record: TransitionRecord) -> None:
        event = record.event
        not_before = None if event is None or event.not_before is None else event.not_before.timestamp()
        observed_at = parse_time(record.observed_at).timestamp()
        arguments = (sink, record.sequence, record.event_key, record.is_urgent, not_before, observed_at, observed_at)
        store.connection.execute(SQL["add_delivery"], arguments)

    def _last_of_active(self, store: Storage) -> list[TransitionRecord]:
        document = document_of(read_meta(store.connection))
        events = () if document is None else document.events
        keys = dict.fromkeys(event.key for event in events if not is_over(event))
        bodies = (store.connection.execute(SQL["last_of_event"], (key,)).fetchone() for key in keys)
        return [decode_record(body[0]) for body in bodies if body is not None]


def _draft(observation: Observation, change: Change) -> _Draft:
    return _Draft(
        transition=change.transition,
        evidence=change.evidence,
        event=change.event,
        previous=change.previous,
        changed=change.changed,
        observed_at=observation.observed_at,
        incarnation=observation.incarnation,
        previous_incarnation=observation.previous_incarnation,
    )


def _repeat(store: Storage, record: TransitionRecord, repeats: _Repeats) -> int:
    """Return how often the outbox holds *record*'s id already.

    It is counted once for each id in a job, in *repeats* from then on: counting for every record is quadratic when
    thousands are alike.
    """
    first_id = _id(record, repeat=0)
    repeat = repeats.get(first_id)
    if repeat is None:
        (repeat,) = store.connection.execute(SQL["repeats"], (first_id, record.sequence)).fetchone()
    while store.connection.execute(SQL["has_id"], (_id(record, repeat=repeat), record.sequence)).fetchone():
        repeat += 1
    repeats[first_id] = int(repeat) + 1
    return int(repeat)


def _id(record: TransitionRecord, *, repeat: int) -> str:
    if record.event is None:
        return record.id
    return record_id(
        vm_key=vm_key(record.vm),
        event_key=record.event_key,
        transition=record.transition,
        incarnation=record.incarnation,
        event=record.event,
        repeat=repeat,
        outcome=None if record.approval is None else (record.approval.decision_id or "", record.approval.result),
    )


def _key(record: TransitionRecord, *, repeat: int) -> str:
    return transition_key(record.event_key, record.transition, record.event, repeat=repeat)
