"""Updates an event's row when a VM reports a new version or a new state of the event.

The row contains counters, such as the number of VMs that report the event as started. For a new report, the portal only
changes these counters, so the cost of a report does not depend on the number of VMs. In rare cases, for example after a
name conflict is resolved, the portal reads all reports of the event and counts again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, select

from bridge.clock import format_time
from bridge.events.event import ScheduledEvent, VmIdentity
from bridge.portal.fleet import THIN, EventSummary, View, count_views, show_version, summary_of, version_of, view_of
from bridge.portal.schema import event_groups, event_variants, event_vms, events, vms
from bridge.portal.store.database import in_parts, insert_missing, rows_in, upsert
from bridge.portal.vm_state import vm_of
from bridge.text import without_nul

_MOST_SEARCH_CHARACTERS = 65_536
event_of_variant = msgspec.json.Decoder(ScheduledEvent).decode


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A changed view.

    *event* is the reported event, or None if only the state or the membership changed.
    """

    old: View | None
    new: View
    groups: tuple[str, ...]
    """The VM's groups."""
    event: ScheduledEvent | None = None


class _Event(msgspec.Struct, kw_only=True):
    summary: EventSummary
    before: str = ""
    """The shown version before the changes."""
    stored: set[str] = set()
    """The versions that have a row."""
    versions: dict[str, ScheduledEvent] = {}
    """The reported versions without a row, and the loaded versions."""
    followed: str | None = None
    """The digest of the version that a member reports after it reported the shown version."""
    must_count: bool = False
    groups: set[str] = set()
    """The new groups."""


def lock_events(connection: Connection, keys: Iterable[str]) -> None:
    """Lock the existing rows of the events *keys*, sorted by key."""
    query = select(events.c.event_key).order_by(events.c.event_key).with_for_update()
    list(rows_in(connection, query, events.c.event_key, sorted(keys)))


def apply_changes(
    connection: Connection, changes: Sequence[Change], *, recount: Collection[str] = (), also_locked: Iterable[str] = ()
) -> None:
    """Store the changed views and update their events.

    For the events in *recount*, the function counts all reports again, for example after a VM changed groups. It
    deletes events that no VM reports anymore. It also locks the events in *also_locked* for the caller, because all
    transactions must lock events in the same order.
    """
    keys = sorted({each.new.event_key for each in changes}.union(recount))
    lock_events(connection, {*keys, *also_locked})
    # Another transaction might have deleted an event while this transaction waited for the lock.
    insert_missing(connection, events, [{"event_key": key} for key in keys])
    lock_events(connection, keys)
    found = _events(connection, keys)
    for key in recount:
        found[key].must_count = True
    views = [_apply(connection, found[each.new.event_key], each) for each in changes]
    upsert(connection, event_vms, [_view_row(each) for each in views])
    for event in found.values():
        _choose(connection, event)
        _store_versions(connection, event)
    gone = [key for key, event in found.items() if not event.summary.categories]
    for part in in_parts(gone):
        connection.execute(delete(events).where(events.c.event_key.in_(part)))
    kept = [event for event in found.values() if event.summary.categories]
    rows = [{"event_key": each.summary.key, "name": name} for each in kept for name in sorted(each.groups)]
    insert_missing(connection, event_groups, rows)
    _store_events(connection, kept)


def views_of_vms(connection: Connection, column: ColumnElement[Any], values: Iterable[Any], *where: Any) -> list[View]:
    """Return the views whose *column* is one of *values*, and that match *where*."""
    query = select(event_vms.c.body).where(*where)
    return [view_of(row.body) for row in rows_in(connection, query, column, values)]


def _events(connection: Connection, keys: Sequence[str]) -> dict[str, _Event]:
    found = {key: _Event(summary=EventSummary(key=key)) for key in keys}
    query = select(events.c.event_key, events.c.body).where(events.c.body.is_not(None))
    for row in rows_in(connection, query, events.c.event_key, keys):
        summary = summary_of(row.body)
        found[row.event_key] = _Event(summary=summary, before=summary.variant, stored=summary.variants)
    return found


def _apply(connection: Connection, event: _Event, change: Change) -> View:
    """Count a changed report. Return the report with `is_member` set for the shown version."""
    old, new, summary = change.old, change.new, event.summary
    is_member, had_members = new.is_named, summary.has_members
    if new.digest != summary.digest and new.owned_name is not None:
        is_member = new.owned_name in _shown_names(connection, event)
    new = msgspec.structs.replace(new, is_member=is_member)
    if change.event is not None and new.variant not in event.stored:
        event.versions[new.variant] = msgspec.structs.replace(change.event, extra={})
    count_views(summary, added=[new], removed=[] if old is None else [old])
    if (old is not None and old.is_member != is_member) or (is_member and not had_members):
        event.must_count = True
    if old is not None and old.is_member and new.is_named and old.variant == summary.variant:
        event.followed = new.digest
    if old is None and (is_member or not summary.has_members):
        event.groups |= set(change.groups)
    return new


def _choose(connection: Connection, event: _Event) -> None:
    """Choose the version of the event to show."""
    summary = event.summary
    if event.must_count:
        _count_again(connection, event)
    if not summary.categories:
        return
    chosen = summary.chosen(event.followed)
    if chosen.variant != summary.variant:
        was_thin, is_thin = summary.variant.endswith(THIN), chosen.variant.endswith(THIN)
        has_other_names = chosen.digest != summary.digest or was_thin != is_thin
        summary.digest, summary.variant = chosen.digest, chosen.variant
        show_version(summary, _shown_version(connection, event), _vm_of_variant(connection, event))
        if has_other_names:
            _count_again(connection, event)
    summary.settle()


def _count_again(connection: Connection, event: _Event) -> None:
    """Determine the members and groups of the event, and count its reports from scratch."""
    summary, names = event.summary, _shown_names(connection, event)
    stored = views_of_vms(connection, event_vms.c.event_key, [summary.key])
    views = [msgspec.structs.replace(each, is_member=each.owned_name in names) for each in stored]
    changed = [new for old, new in zip(stored, views, strict=True) if new != old]
    upsert(connection, event_vms, [_view_row(each) for each in changed])
    summary.categories, summary.first_observed_at, summary.observed_at = (), "", ""
    count_views(summary, added=views)
    event.groups = _groups_of(connection, summary)


def _groups_of(connection: Connection, summary: EventSummary) -> set[str]:
    """Delete the groups of the event, and return its current groups.

    These are the groups of the event's members, or of all reporting VMs if the event has no members.
    """
    connection.execute(delete(event_groups).where(event_groups.c.event_key == summary.key))
    query = select(vms.c.groups).distinct().join(event_vms, event_vms.c.vm_key == vms.c.vm_key)
    query = query.where(event_vms.c.event_key == summary.key)
    if summary.has_members:
        query = query.where(event_vms.c.is_member.is_(True))
    texts = connection.execute(query).scalars()
    return {name for text in texts if text for name in text.split("\n") if name}


def _shown_version(connection: Connection, event: _Event) -> ScheduledEvent:
    key, variant = event.summary.key, event.summary.variant
    if variant not in event.versions:
        is_row = and_(event_variants.c.event_key == key, event_variants.c.variant == variant)
        body = connection.execute(select(event_variants.c.body).where(is_row)).scalar_one()
        event.versions[variant] = event_of_variant(body)
    return event.versions[variant]


def _shown_names(connection: Connection, event: _Event) -> frozenset[str]:
    """Return the normalized names in Resources of the shown version."""
    return version_of(_shown_version(connection, event)).names if event.summary.variant else frozenset()


def _vm_of_variant(connection: Connection, event: _Event) -> VmIdentity:
    of_variant = and_(event_vms.c.event_key == event.summary.key, event_vms.c.variant == event.summary.variant)
    query = select(vms.c.body).join(event_vms, event_vms.c.vm_key == vms.c.vm_key).where(of_variant)
    body = connection.execute(query.order_by(event_vms.c.is_member.desc()).limit(1)).scalar()
    return VmIdentity() if body is None else vm_of(body).vm


def _store_versions(connection: Connection, event: _Event) -> None:
    """Store new versions of the event, and delete versions that no VM reports anymore."""
    key, reported = event.summary.key, event.summary.variants
    rows = [
        {"event_key": key, "variant": name, "body": msgspec.json.encode(event.versions[name]).decode()}
        for name in reported - event.stored
    ]
    if rows:
        connection.execute(event_variants.insert(), rows)
    gone = event.stored - reported
    if gone:
        is_gone = and_(event_variants.c.event_key == key, event_variants.c.variant.in_(gone))
        connection.execute(delete(event_variants).where(is_gone))


def _store_events(connection: Connection, found: Sequence[_Event]) -> None:
    upsert(connection, events, [_event_row(each.summary) for each in found])
    for event in found:
        summary = event.summary
        if summary.variant != event.before:
            names = _shown_version(connection, event).resources or ()
            lines = (summary.event.event_id or "", summary.event.description or "", *names)
            search = without_nul("\n".join(lines)).casefold()[:_MOST_SEARCH_CHARACTERS]
            connection.execute(events.update().where(events.c.event_key == summary.key).values(search=search))


def _event_row(summary: EventSummary) -> dict[str, Any]:
    event = summary.event
    return {
        "event_key": summary.key,
        "state": summary.state.value,
        "is_open": summary.is_open,
        "event_type": None if event.event_type is None else without_nul(event.event_type),
        "digest": summary.digest,
        "sort_at": summary.first_observed_at if event.not_before is None else format_time(event.not_before),
        "first_observed_at": summary.first_observed_at,
        "over_at": None if summary.is_open else summary.observed_at,
        "sole_vm_key": summary.sole_vm_key,
        "wave": summary.wave,
        "vm_count": summary.names_count,
        "body": msgspec.json.encode(summary).decode(),
    }


def _view_row(view: View) -> dict[str, Any]:
    return {
        "event_key": view.event_key,
        "vm_key": view.vm_key,
        "variant": view.variant,
        "is_open": view.current.is_open,
        "is_member": view.is_member,
        "stored_bytes": view.stored_bytes,
        "received_at": view.observed_at,
        "body": msgspec.json.encode(view).decode(),
    }
