"""Lists, counts, and reads events.

Filters apply in SQL before any counting, sorting, or truncation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from bridge.clock import format_time, parse_time
from bridge.events.event import ADVISORY_EVENT_TYPES, ScheduledEvent, normal_name
from bridge.events.record import Evidence
from bridge.portal.fleet import (
    EventState,
    EventStatus,
    EventSummary,
    Report,
    State,
    View,
    VmOfEvent,
    summary_of,
    unconfirmed_names,
    undecidable_because,
    version_of,
    view_of,
)
from bridge.portal.requests import RequestRefused
from bridge.portal.schema import event_groups, event_variants, event_vms, events, records, vms
from bridge.portal.store.database import contains_text, rows_in
from bridge.portal.store.fold import event_of_variant, views_of_vms
from bridge.portal.vm_state import vm_of

PAGE = 100
_SOON = timedelta(minutes=10)

#: The values of `EventFilter.decision`.
DECISIONS = ("undecided", "held", "waiting", "approved", "refused")


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filters for events. An event must match every filter that is set."""

    text: str = ""
    """Part of a VM name in Resources, of the EventId, or of the description, regardless of case."""
    event_type: str | None = None
    states: tuple[State, ...] = ()
    decision: str | None = None
    """One of `DECISIONS`."""
    is_soon: bool = False
    """Only events whose NotBefore is less than 10 minutes away."""
    groups: tuple[str, ...] = ()
    """The event must be in all of these groups, such as ``resource_group:west``, ``labels.team:payments``,
    ``region:westeurope``, or ``subscription:ID``. All values except labels are in lowercase."""
    scope: tuple[str, ...] = ()
    """The event must be in at least one of these groups. An empty scope means all events."""
    sole_vm_key: str | None = None
    """Only events that this VM reports and no other VM reports."""
    wave: str | None = None
    """Only the announced events of this wave (`Wave.key`)."""


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """Announced events of one type, region, and hour."""

    key: str
    """The value of `EventFilter.wave`."""
    events: int
    vms: int
    """The number of different VMs in the Resources of these events."""
    decisions: dict[str, int]
    """The number of events for each value of `DECISIONS`. A value without events is left out."""
    held_by: str
    """The names of the people who hold events of the wave."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the first page: one event, or one wave."""

    event: EventSummary
    """The event, or the event of the wave that Azure starts first."""
    decision: str | None = None
    """One of `DECISIONS` except ``refused``. None if no decision counts and no one can decide, and in past events."""
    decided_by: str = ""
    """The names of the people behind the decision."""
    needed: int = 0
    """The number of people who must still approve."""
    is_refused: bool = False
    wave: Wave | None = None


class LinePage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of lines, with its position in the whole list."""

    lines: tuple[Line, ...]
    total: int
    """The number of lines in the whole list."""
    events: int
    """The number of events in the whole list."""
    first: int
    """The position of the first line of this page in the whole list, counted from 1."""
    cursor: str | None
    """The cursor of the next page, or None on the last page."""


def list_events(
    connection: Connection, wanted: EventFilter, *, now: str, limit: int = PAGE, cursor: str | None = None
) -> LinePage:
    """Return a page of open and past events, newest first."""
    where = [*conditions(wanted, now=now), events.c.body.is_not(None)]
    total = int(connection.execute(select(func.count()).select_from(events).where(*where)).scalar_one())
    first = 1
    if cursor is not None:
        first, at, key = cursor_parts(cursor, 3)
        is_same = (events.c.first_observed_at == at) & (events.c.event_key > key)
        where.append(or_(events.c.first_observed_at < at, is_same))
    query = select(events.c.body).where(*where).order_by(events.c.first_observed_at.desc(), events.c.event_key)
    found = [summary_of(body) for body in connection.execute(query.limit(limit + 1)).scalars()]
    page, following = found[:limit], None
    if len(found) > limit:
        following = f"{first + len(page)}~{page[-1].first_observed_at}~{page[-1].key}"
    lines = tuple(Line(event=each) for each in page)
    return LinePage(lines=lines, total=total, events=total, first=first, cursor=following)


def events_over_since(connection: Connection, wanted: EventFilter, *, since: str, now: str, limit: int) -> list[Line]:
    """Return the events that ended at or after *since*, in descending order of their end."""
    where = [*conditions(wanted, now=now), events.c.over_at >= since]
    query = select(events.c.body).where(*where).order_by(events.c.over_at.desc(), events.c.event_key)
    return [Line(event=summary_of(body)) for body in connection.execute(query.limit(limit)).scalars()]


def summaries_of(
    connection: Connection, keys: Iterable[str], *, scope: tuple[str, ...] = ()
) -> dict[str, EventSummary]:
    """Return the summaries of the known events with *keys* that a person with *scope* may see."""
    in_scope = conditions(EventFilter(scope=scope), now="")
    query = select(events.c.event_key, events.c.body).where(events.c.body.is_not(None), *in_scope)
    return {row.event_key: summary_of(row.body) for row in rows_in(connection, query, events.c.event_key, keys)}


def vms_of(connection: Connection, keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the subscription, resource group, and name of each VM of the events *keys*."""
    summaries = summaries_of(connection, keys)
    found: dict[str, set[str]] = {}
    for row in rows_in(connection, select(event_variants), event_variants.c.event_key, summaries):
        summary = summaries[row.event_key]
        if row.variant == summary.variant:
            place = f"{summary.subscription}/{summary.resource_group}".casefold()
            names = event_of_variant(row.body).resources or ()
            found[row.event_key] = {f"{place}/{normal_name(name)}" for name in names}
    return found


def event_of(connection: Connection, key: str, *, now: str) -> EventState | None:
    """Return the event with *key*, or None if no record reports the event."""
    return events_of(connection, [key], now=now).get(key)


def events_of(connection: Connection, keys: Iterable[str], *, now: str) -> dict[str, EventState]:
    """Return the known events with *keys*, including the views of their VMs."""
    summaries = summaries_of(connection, keys)
    views: dict[str, list[VmOfEvent]] = {key: [] for key in summaries}
    groups: dict[str, list[str]] = {key: [] for key in summaries}
    reported = rows_in(connection, select(event_variants), event_variants.c.event_key, summaries)
    versions = {(row.event_key, row.variant): event_of_variant(row.body) for row in reported}
    query = select(event_vms.c.event_key, event_vms.c.body, vms.c.body.label("vm"), vms.c.groups, vms.c.confirmed_until)
    query = query.join(vms, vms.c.vm_key == event_vms.c.vm_key).order_by(vms.c.name, vms.c.vm_key)
    for row in rows_in(connection, query, event_vms.c.event_key, summaries):
        digest, view = summaries[row.event_key].digest, view_of(row.body)
        description = versions[row.event_key, view.variant].description
        views[row.event_key].append(_vm_of_event(view, row, description, digest=digest, now=now))
    names = select(event_groups).order_by(event_groups.c.name)
    for row in rows_in(connection, names, event_groups.c.event_key, summaries):
        groups[row.event_key].append(row.name)
    return {
        key: _state_of(summary, versions[key, summary.variant], views[key], groups[key])
        for key, summary in summaries.items()
    }


def records_of(connection: Connection, key: str, *, limit: int = 1_000) -> list[str]:
    """Return the original text of the event's newest *limit* records, oldest first."""
    query = select(records.c.body).where(records.c.event_key == key)
    newest = query.order_by(records.c.observed_at.desc(), records.c.record_id).limit(limit)
    return list(connection.execute(newest).scalars())[::-1]


def newest_record(connection: Connection, key: str, vm_key: str) -> list[str]:
    """Return the original text of the record with the VM's view of the event."""
    views = views_of_vms(connection, event_vms.c.event_key, [key], event_vms.c.vm_key == vm_key)
    is_own = records.c.vm_key == vm_key
    query = select(records.c.body).where(is_own, records.c.record_id.in_([each.record_id for each in views]))
    return list(connection.execute(query).scalars())


def conditions(wanted: EventFilter, *, now: str) -> list[ColumnElement[bool]]:
    """Return the conditions of *wanted* at the time *now*."""
    equal = {"event_type": wanted.event_type, "sole_vm_key": wanted.sole_vm_key, "wave": wanted.wave}
    found = [events.c[name] == value for name, value in equal.items() if value is not None]
    if wanted.text:
        found.append(contains_text(events.c.search, wanted.text))
    if wanted.states:
        found.append(events.c.state.in_([each.value for each in wanted.states]))
    if wanted.decision is not None:
        found.append(is_decision(wanted.decision, now))
    if wanted.is_soon:
        found.append(is_soon(now))
    for names in filter(None, (*((each,) for each in wanted.groups), wanted.scope)):
        of_groups = select(event_groups.c.event_key).where(event_groups.c.name.in_(names))
        found.append(events.c.event_key.in_(of_groups))
    return found


def is_soon(now: str) -> ColumnElement[bool]:
    """Return the condition of `EventFilter.is_soon`."""
    until = format_time(parse_time(now) + _SOON)
    return and_(events.c.sort_at > now, events.c.sort_at < until)


def is_decision(decision: str, now: str) -> ColumnElement[bool]:
    """Return the condition of one of `DECISIONS` at the time *now*."""
    if decision == "refused":
        return events.c.is_refused.is_(True)
    is_valid = or_(
        events.c.decision == "held",
        and_(events.c.decision_digest == events.c.digest, events.c.decision_until > now),
    )
    if decision == "undecided":
        is_decidable = func.coalesce(events.c.event_type, "").not_in(ADVISORY_EVENT_TYPES)
        return and_(events.c.state == State.SCHEDULED.value, is_decidable, or_(events.c.decision.is_(None), ~is_valid))
    return and_(events.c.decision == decision, is_valid)


def cursor_parts(text: str, count: int) -> tuple[Any, ...]:
    """Return the position and the other parts of a cursor that `requests.cursor_of` accepted."""
    parts = text.split("~")
    if len(parts) != count:
        raise RequestRefused(400, "The cursor must come from an earlier page.")
    return int(parts[0]), *parts[1:]


def _vm_of_event(view: View, row: Any, description: str | None, *, digest: str, now: str) -> VmOfEvent:
    vm = vm_of(row.vm)
    reported = {name: getattr(view, name) for name in Report.__struct_fields__}
    evidence = view.evidence if view.current is view.state else Evidence.UNKNOWN
    return VmOfEvent(
        **{**reported, "state": view.current, "evidence": evidence},
        name=vm.name,
        vm=vm.vm,
        groups=tuple(filter(None, row.groups.split("\n"))),
        description=description,
        is_confirmed=view.is_member and row.confirmed_until > now,
        agrees=view.digest == digest,
    )


def _state_of(
    summary: EventSummary, event: ScheduledEvent, views: Sequence[VmOfEvent], groups: Sequence[str]
) -> EventState:
    azure_status = {State.SCHEDULED: "Scheduled", State.STARTED: "Started"}.get(summary.state, event.event_status)
    event = msgspec.structs.replace(event, description=summary.event.description, event_status=azure_status)
    why = undecidable_because(event, summary.state)
    if why is None and version_of(event).digest != summary.digest:
        why = "the VM has reached a limit, so the portal dropped the details"
    status = {name: getattr(summary, name) for name in EventStatus.__struct_fields__}
    return EventState(
        **{**status, "event": event},
        undecidable_because=why,
        vms=tuple(views),
        unconfirmed=unconfirmed_names(event, views),
        groups=tuple(groups),
    )
