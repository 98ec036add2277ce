"""Updates the rows of events after the views of VMs change (`bridge.portal.fleet`).

Each event has counters of its VMs by state and by version. When a view changes, the portal only increases or decreases
these counters, so the cost does not depend on the number of VMs. After a rare change, such as the first member or a
resolved name conflict, the portal counts all views of the event again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, select

from bridge.events.event import ScheduledEvent, VmIdentity
from bridge.portal.fleet import EventSummary, View, count_view, show_version, version_of
from bridge.portal.schema import event_groups, event_variants, event_vms, events, vms
from bridge.portal.store.database import in_parts, insert, upsert
from bridge.portal.vm_state import VmState
from bridge.text import without_nul

_MOST_SEARCH_CHARACTERS = 65_536
_summary_of = msgspec.json.Decoder(EventSummary).decode
_view_of = msgspec.json.Decoder(View).decode
_vm_of = msgspec.json.Decoder(VmState).decode
event_of_variant = msgspec.json.Decoder(ScheduledEvent).decode


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A changed view.

    *event* is the reported event, or None if only the state or the membership changed.
    """

    old: View | None
    new: View
    event: ScheduledEvent | None = None
    is_thin: bool = False
    """Whether the VM has too many open events, so that the portal drops the details."""


class _Variant(msgspec.Struct, kw_only=True):
    digest: str
    description: str | None
    members: int = 0
    """The number of VMs that report this version and whose names it contains."""
    reporters: int = 0
    body: str | None = None
    """None if the row already exists."""


class _Event(msgspec.Struct, kw_only=True):
    summary: EventSummary
    variants: dict[str, _Variant] = {}
    changed: set[str] = set()
    followed: str | None = None
    """The new version of a member that reported the shown version before."""
    must_count: bool = False
    new_groups: set[str] = set()
    names: frozenset[str] | None = None
    """The names of the shown version, or None if they are not loaded."""
    shown: ScheduledEvent | None = None
    """The shown version if it changed."""


def lock_events(connection: Connection, keys: Sequence[str]) -> None:
    """Lock the rows of the sorted *keys*. Create the rows that do not exist."""
    connection.execute(insert(connection, events).on_conflict_do_nothing(), [{"event_key": key} for key in keys])
    lock_known_events(connection, keys)


def lock_known_events(connection: Connection, keys: Sequence[str]) -> None:
    """Lock the existing rows of *keys*, which must be sorted."""
    for part in in_parts(keys):
        locked = select(events.c.event_key).where(events.c.event_key.in_(part)).order_by(events.c.event_key)
        connection.execute(locked.with_for_update())


def apply_changes(
    connection: Connection, changes: Sequence[Change], *, groups: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Store the changed views and update their events. Return the keys of the events.

    *groups* contains the groups of each VM in *changes*.
    """
    keys = sorted({each.new.event_key for each in changes})
    if not keys:
        return ()
    lock_events(connection, keys)
    found = _events(connection, keys)
    settled = [_with_membership(connection, found[each.new.event_key], each) for each in changes]
    store_views(connection, [each.new for each in settled])
    for change in settled:
        _apply(found[change.new.event_key], change, groups)
    _finish(connection, found)
    return tuple(keys)


def count_again(connection: Connection, keys: Sequence[str]) -> None:
    """Count all views of the events *keys* again, for example after a VM changed groups.

    Delete events without a view.
    """
    keys = sorted(keys)
    if not keys:
        return
    lock_events(connection, keys)
    found = _events(connection, keys)
    for event in found.values():
        event.must_count = True
    _finish(connection, found)


def _finish(connection: Connection, found: dict[str, _Event]) -> None:
    """Choose the shown version of each event, and store the event."""
    gone = []
    for key, event in found.items():
        if event.must_count:
            _count_versions(connection, key, event)
        if not any(each.reporters for each in event.variants.values()):
            gone.append(key)
            continue
        if _choose(connection, event) or event.must_count:
            _count_members(connection, key, event)
        _describe(event)
    for key in gone:
        del found[key]
    for part in in_parts(gone):
        for table in (events, event_groups, event_variants):
            connection.execute(delete(table).where(table.c.event_key.in_(part)))
    _store_variants(connection, found)
    _store_groups(connection, found)
    _store_events(connection, found)


def store_views(connection: Connection, views: Sequence[View]) -> None:
    """Insert or replace *views*."""
    upsert(connection, event_vms, [_view_row(each) for each in views])


def views_of_vms(connection: Connection, where: ColumnElement[bool]) -> list[View]:
    """Return the views that match *where*."""
    return [_view_of(body) for body in connection.execute(select(event_vms.c.body).where(where)).scalars()]


def _events(connection: Connection, keys: Sequence[str]) -> dict[str, _Event]:
    found = {key: _Event(summary=EventSummary(key=key)) for key in keys}
    for part in in_parts(keys):
        rows = select(events.c.event_key, events.c.body).where(events.c.event_key.in_(part), events.c.body.is_not(None))
        for row in connection.execute(rows):
            found[row.event_key].summary = _summary_of(row.body)
        columns = [each for each in event_variants.c if each.name != "body"]
        for row in connection.execute(select(*columns).where(event_variants.c.event_key.in_(part))):
            found[row.event_key].variants[row.variant] = _Variant(
                digest=row.digest, description=row.description, members=row.members, reporters=row.reporters
            )
    return found


def _with_membership(connection: Connection, event: _Event, change: Change) -> Change:
    """Return *change* with the correct `is_member` for the names in the shown version."""
    new, summary = change.new, event.summary
    is_member = new.is_named
    if new.digest != summary.digest and new.owned_name is not None:
        if event.names is None:
            event.names = frozenset() if not summary.variant else _names_of(connection, event)
        is_member = new.owned_name in event.names
    return msgspec.structs.replace(change, new=msgspec.structs.replace(new, is_member=is_member))


def _apply(event: _Event, change: Change, groups: Mapping[str, Sequence[str]]) -> None:
    old, new, summary = change.old, change.new, event.summary
    had_members = any(summary.members.values())
    if change.event is not None and new.variant not in event.variants:
        event.variants[new.variant] = _new_variant(change.event, new, is_thin=change.is_thin)
    if (old is not None and old.is_member != new.is_member) or (new.is_member and not had_members):
        event.must_count = True
    if old is not None:
        _count_variant(event, old, -1)
        count_view(summary, old, -1)
    _count_variant(event, new, 1)
    count_view(summary, new, 1)
    if old is not None and old.is_member and new.is_named and old.variant == summary.variant:
        event.followed = new.variant
    summary.sole_vm_key = new.vm_key if sum(summary.reporters.values()) == 1 else None
    if old is None and (new.is_member or not any(summary.members.values())):
        event.new_groups |= set(groups.get(new.vm_key, ()))


def _count_variant(event: _Event, view: View, change: int) -> None:
    variant = event.variants.get(view.variant)
    if variant is not None:
        variant.reporters += change
        variant.members += change if view.is_named else 0
        event.changed.add(view.variant)


def _new_variant(event: ScheduledEvent, view: View, *, is_thin: bool) -> _Variant:
    kept = msgspec.structs.replace(event, extra={})
    if is_thin:
        kept = ScheduledEvent(event_id=event.event_id, event_type=event.event_type, event_status=event.event_status)
    description = None if kept.description is None else without_nul(kept.description)
    return _Variant(digest=view.digest, description=description, body=msgspec.json.encode(kept).decode())


def _count_versions(connection: Connection, key: str, event: _Event) -> None:
    for name, variant in event.variants.items():
        variant.members = variant.reporters = 0
        event.changed.add(name)
    for view in views_of_vms(connection, event_vms.c.event_key == key):
        _count_variant(event, view, 1)


def _choose(connection: Connection, event: _Event) -> bool:
    """Choose the version of the event to show. Return whether the event's digest changed."""
    summary, before = event.summary, event.summary.digest
    votes: dict[str, tuple[int, int]] = {}
    for each in event.variants.values():
        members, reporters = votes.get(each.digest, (0, 0))
        votes[each.digest] = members + each.members, reporters + each.reporters
    best = max(votes, key=lambda digest: (votes[digest], digest == before, digest))
    followed = event.variants.get(event.followed or "")
    if followed is not None and votes[followed.digest] == votes[best]:
        best = followed.digest
    shown = {name: each for name, each in event.variants.items() if each.digest == best}
    variant = max(shown, key=lambda name: (shown[name].members, shown[name].reporters, name == summary.variant, name))
    if variant != summary.variant:
        summary.digest, summary.variant = best, variant
        event.shown = _version_of(connection, event)
        show_version(summary, event.shown, _vm_of_variant(connection, event))
        event.names = version_of(event.shown).names
    return summary.digest != before


def _count_members(connection: Connection, key: str, event: _Event) -> None:
    """Find the VMs that own a name in the shown version, and count all views again."""
    summary = event.summary
    summary.members, summary.reporters, summary.ending = {}, {}, (-1, "ended")
    summary.first_observed_at = summary.observed_at = ""
    names = _names_of(connection, event) if event.names is None else event.names
    stored = views_of_vms(connection, event_vms.c.event_key == key)
    views = [msgspec.structs.replace(each, is_member=each.owned_name in names) for each in stored]
    store_views(connection, [new for old, new in zip(stored, views, strict=True) if new != old])
    for view in sorted(views, key=lambda view: not view.is_member):
        count_view(summary, view, 1)
    summary.sole_vm_key = views[0].vm_key if len(views) == 1 else None
    connection.execute(delete(event_groups).where(event_groups.c.event_key == key))
    query = select(vms.c.groups).distinct().join(event_vms, event_vms.c.vm_key == vms.c.vm_key)
    where = [
        event_vms.c.event_key == key,
        *([event_vms.c.is_member.is_(True)] if any(summary.members.values()) else []),
    ]
    texts = connection.execute(query.where(*where)).scalars()
    event.new_groups = {name for text in texts if text for name in text.split("\n") if name}


def _describe(event: _Event) -> None:
    summary = event.summary
    shown = [each for each in event.variants.values() if each.digest == summary.digest and each.reporters > 0]
    has_members = any(each.members for each in shown)
    descriptions = {each.description for each in shown if each.members or not has_members}
    summary.description = descriptions.pop() if len(descriptions) == 1 else None
    agreeing = sum(each.reporters for each in shown if each.members or not has_members)
    summary.differing = sum(summary.reporters.values()) - agreeing
    summary.settle()


def _version_of(connection: Connection, event: _Event) -> ScheduledEvent:
    summary = event.summary
    body = event.variants[summary.variant].body
    if body is None:
        is_row = and_(event_variants.c.event_key == summary.key, event_variants.c.variant == summary.variant)
        body = connection.execute(select(event_variants.c.body).where(is_row)).scalar_one()
    return event_of_variant(body)


def _names_of(connection: Connection, event: _Event) -> frozenset[str]:
    return version_of(_version_of(connection, event)).names


def _vm_of_variant(connection: Connection, event: _Event) -> VmIdentity:
    of_variant = and_(event_vms.c.event_key == event.summary.key, event_vms.c.variant == event.summary.variant)
    query = select(vms.c.body).join(event_vms, event_vms.c.vm_key == vms.c.vm_key).where(of_variant)
    body = connection.execute(query.order_by(event_vms.c.is_member.desc()).limit(1)).scalar()
    return VmIdentity() if body is None else _vm_of(body).vm


def _store_variants(connection: Connection, found: Mapping[str, _Event]) -> None:
    for key, event in found.items():
        gone = [name for name in event.changed if event.variants[name].reporters <= 0]
        rows = {name: event.variants[name] for name in event.changed if name not in gone}
        new = [_variant_row(key, name, each) for name, each in rows.items() if each.body is not None]
        if new:
            connection.execute(event_variants.insert(), new)
        table = event_variants
        for name, each in rows.items():
            if each.body is None:
                is_row = and_(table.c.event_key == key, table.c.variant == name)
                counts = {"members": each.members, "reporters": each.reporters}
                connection.execute(table.update().where(is_row).values(**counts))
        if gone:
            is_gone = and_(table.c.event_key == key, table.c.variant.in_(gone))
            connection.execute(delete(table).where(is_gone))
            for name in gone:
                del event.variants[name]


def _store_groups(connection: Connection, found: Mapping[str, _Event]) -> None:
    rows = [
        {"event_key": key, "name": without_nul(name)}
        for key, event in sorted(found.items())
        for name in sorted(event.new_groups)
    ]
    if rows:
        connection.execute(insert(connection, event_groups).on_conflict_do_nothing(), rows)


def _store_events(connection: Connection, found: Mapping[str, _Event]) -> None:
    upsert(connection, events, [_event_row(each.summary) for each in found.values()])
    for key, event in found.items():
        if event.shown is not None:
            lines = (event.summary.event_id or "", event.summary.description or "", *(event.shown.resources or ()))
            search = without_nul("\n".join(lines)).casefold()[:_MOST_SEARCH_CHARACTERS]
            connection.execute(events.update().where(events.c.event_key == key).values(search=search))


def _event_row(summary: EventSummary) -> dict[str, Any]:
    return {
        "event_key": summary.key,
        "state": summary.state.value,
        "is_open": summary.is_open,
        "event_type": None if summary.event_type is None else without_nul(summary.event_type),
        "digest": summary.digest,
        "sort_at": summary.not_before or summary.first_observed_at,
        "first_observed_at": summary.first_observed_at,
        "over_at": None if summary.is_open else summary.observed_at,
        "sole_vm_key": summary.sole_vm_key,
        "wave": summary.wave,
        "vm_count": summary.names_count,
        "body": msgspec.json.encode(summary).decode(),
    }


def _variant_row(key: str, name: str, each: _Variant) -> dict[str, Any]:
    return {
        "event_key": key,
        "variant": name,
        "digest": each.digest,
        "members": each.members,
        "reporters": each.reporters,
        "description": each.description,
        "body": each.body,
    }


def _view_row(view: View) -> dict[str, Any]:
    return {
        "event_key": view.event_key,
        "vm_key": view.vm_key,
        "event_id": None if view.event_id is None else without_nul(view.event_id),
        "variant": view.variant,
        "is_open": view.current.is_open,
        "is_member": view.is_member,
        "state": view.current.value,
        "received_at": view.observed_at,
        "body": msgspec.json.encode(view).decode(),
    }
