"""Builds records from document changes, heartbeats, and approval outcomes.

The saver writes a document, its records, and their deliveries in one transaction. After a crash, the file contains all
of these rows or none of them. If the rows are missing, the next poll builds the same records with the same IDs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime

import msgspec

from bridge.clock import format_time, parse_time
from bridge.events.event import VmIdentity, encode, names_vm
from bridge.events.record import TimelineEntry, TransitionRecord, record_id, repeat_key, transition_key, vm_key
from bridge.events.stream import new_stream_id
from bridge.outbox import deliveries
from bridge.outbox.rows import EventRow, RecordRow
from bridge.outbox.state import State

Router = Callable[[TransitionRecord, str | None, Collection[str]], Iterable[str]]
"""Selects the sinks for a record. The arguments are the record, the VM's name, and the sinks that have the event."""

#: At this limit, each new entry replaces the newest one, so that one event cannot fill the memory.
_MOST_TIMELINE_ENTRIES = 100


class RecordContext(msgspec.Struct, frozen=True, kw_only=True):
    """This VM's identity and the sink configuration for new records."""

    vm: VmIdentity = VmIdentity()
    router: Router | None = None
    """None until the sinks are configured."""
    sinks: tuple[str, ...] = ()
    current_state_only: frozenset[str] = frozenset()
    labels: dict[str, str] = {}


#: This key in `meta` contains the newest ending record with a measured impact, which the command `status` shows.
LAST_ENDING = "last_ending"


def save_liveness(state: State, *, last_good_at: datetime, boot_id: str) -> None:
    """Store the time of the last good response from IMDS, and this VM's current boot ID."""
    state.put("last_good_at", format_time(last_good_at))
    state.put("boot_id", boot_id)


def append(
    state: State, new: Sequence[TransitionRecord], context: RecordContext, active_event_ids: tuple[str, ...] | None
) -> list[TransitionRecord]:
    """Give each record an ID and a sequence, store it with its deliveries, and return it."""
    added = []
    for each in new:
        sequence = state.next_sequence
        state.put("next_sequence", str(sequence + 1))
        placed = msgspec.structs.replace(
            each,
            stream_id=state.get("stream_id") or "",
            sequence=sequence,
            active_event_ids=active_event_ids,
            vm=context.vm,
            labels=context.labels,
        )
        known, content = event(state, each.event_key), repeat_key(each.transition, each.event)
        record = _with_ids(placed, known.counts.get(content, 0))
        if record.transition.is_ending:
            record = msgspec.structs.replace(record, timeline=known.timeline)
        row = RecordRow(
            sequence=sequence,
            id=record.id,
            event_key=record.event_key,
            observed_at=parse_time(record.observed_at).timestamp(),
            body=encode(record),
        )
        state.records.put(row)
        if record.impact is not None:
            state.put(LAST_ENDING, row.body.decode())
        sinks = () if context.router is None else tuple(context.router(record, context.vm.name, known.sinks))
        for sink in sinks:
            state.put_delivery(deliveries.new_delivery(row, record, sink))
        if record.event is not None:
            _note_event(state, record, row, content, sinks)
        state.settle(sequence)
        added.append(record)
    deliveries.expire_outdated(state, context.current_state_only, {record.event_key for record in added})
    for key in {record.event_key for record in added if record.is_urgent}:
        deliveries.make_event_urgent(state, key)
    return added


def add_sinks(state: State, context: RecordContext) -> None:
    """Add new sinks. Each new sink gets the newest record of each active event."""
    new = [name for name in context.sinks if name not in state.sinks.rows]
    for name in new:
        state.count(name)
    if context.router is None or not new:
        return
    for known in list(state.events.rows.values()):
        row = state.records.rows.get(known.last_state_sequence or 0)
        if known.ended_at is None and row is not None:
            names = [name for name in context.router(row.record, context.vm.name, ()) if name in new]
            for name in names:
                state.put_delivery(deliveries.new_delivery(row, row.record, name))
            sinks = {**known.sinks, **dict.fromkeys(names, row.sequence)}
            state.put_event(msgspec.structs.replace(known, sinks=sinks))


def _with_ids(record: TransitionRecord, n: int) -> TransitionRecord:
    key = f"{record.stream_id}/{record.sequence}" if record.event is None else record.event.key
    outcome = None if record.approval is None else (record.approval.decision_id or "", record.approval.result)
    return msgspec.structs.replace(
        record,
        id=record_id(
            vm_key=vm_key(record.vm),
            event_key=key,
            transition=record.transition,
            event=record.event,
            n=n,
            outcome=outcome,
        ),
        transition_key=transition_key(key, record.transition, record.event, n=n),
        affects_this_vm=names_vm(record.event, record.vm.name),
    )


def _note_event(state: State, record: TransitionRecord, row: RecordRow, content: str, sinks: Sequence[str]) -> None:
    entry = TimelineEntry(
        transition=record.transition,
        observed_at=record.observed_at,
        decision_id=None if record.approval is None else record.approval.decision_id,
    )
    is_started = record.event is not None and record.event.event_status == "Started"
    known = state.events.rows.get(row.event_key) or EventRow(key=row.event_key, ended_at=row.observed_at)
    known = msgspec.structs.replace(
        known,
        was_started=known.was_started or is_started,
        counts={**known.counts, content: known.counts.get(content, 0) + 1},
        timeline=(*known.timeline[: _MOST_TIMELINE_ENTRIES - 1], entry),
    )
    if record.approval is None:  # only a record that Azure caused can begin or end an event
        is_ending = record.transition.is_ending
        known = msgspec.structs.replace(
            known,
            ended_at=row.observed_at if is_ending else None,
            has_ended=known.has_ended or is_ending,
            last_state_sequence=row.sequence,
            sinks={} if is_ending else {**known.sinks, **dict.fromkeys(sinks, row.sequence)},
            timeline=() if is_ending else known.timeline,
        )
    state.put_event(known)


def start_empty(state: State, now: datetime) -> None:
    """Delete another VM's state. The next poll creates new records for all events."""
    stream_id, sequence = state.get("stream_id"), state.get("next_sequence")
    state.reset("it belongs to another machine")
    state.put("stream_id", new_stream_id(now, stream_id))
    state.put("next_sequence", sequence)
    state.put("created_at", format_time(now))


def event(state: State, event_key: str) -> EventRow:
    """Return the row of an event, or an empty row if the event is unknown."""
    return state.events.rows.get(event_key) or EventRow(key=event_key)


def last_record(state: State, event_key: str) -> TransitionRecord | None:
    """Return an event's newest record that Azure caused; None if it is not in memory."""
    row = state.records.rows.get(event(state, event_key).last_state_sequence or 0)
    return None if row is None else row.record
