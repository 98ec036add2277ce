"""Finds events that need a notification, and keeps each notification until it is sent.

The primary key is a hash of the target, the kind, the event, and the occurrence. If two processes find the same
notification, the database therefore stores only one row. A process claims a row before it sends the notification. If
the process is killed before it finishes, the claim expires and another process sends the notification.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, String, cast, delete, exists, func, select, update

from bridge.events.event import ADVISORY_EVENT_TYPES
from bridge.portal.fleet import EventSummary, State, summary_of
from bridge.portal.notify_settings import Kind
from bridge.portal.schema import decisions, event_vms, events, notifications
from bridge.portal.store.database import insert_missing, rows_in
from bridge.portal.store.events import EventFilter, is_decision
from bridge.portal.store.open_events import collapsed
from bridge.portal.store.vms import vm_names

#: The maximum number of notifications per hour and kind about one subject: an event, or the only VM that reports it.
_MOST_OF_SUBJECT = 2
_ID_CHARACTERS = 32


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An event that needs a notification."""

    kind: Kind
    event_key: str
    occurrence: str
    """The version, approval, decision, or VM that distinguishes this notification from others about the event."""
    subject: str
    """The only VM that reports the event, or the event if several VMs report it."""

    def id_for(self, target: str) -> str:
        """Return the ID of the notification for *target*."""
        name = f"{target}\n{self.kind.value}\n{self.event_key}\n{self.occurrence}"
        return f"msg_{hashlib.sha256(name.encode()).hexdigest()[:_ID_CHARACTERS]}"


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """A notification that this process has claimed."""

    notification_id: str
    kind: Kind
    event: EventSummary | None
    """None if the notification is obsolete, for example because a person decided on the event."""
    vm_key: str = ""
    """The VM of the disconnected agent."""
    vm_name: str = ""
    alone: int = 0
    """If the page collapses the event, the number of open events that only this VM reports."""
    attempts: int = 1


def find(connection: Connection, kind: Kind, *, now: str, until: str) -> list[Finding]:
    """Return the open events that need a notification of *kind*, sorted by NotBefore.

    An undecided event needs a notification only if its NotBefore is between *now* and *until*.
    """
    query, _ = _query(kind, now)
    if kind is Kind.UNDECIDED:
        query = query.where(events.c.sort_at > now, events.c.sort_at <= until)
    return [
        Finding(kind=kind, event_key=row.event_key, occurrence=row.occurrence, subject=row.sole_vm_key or row.event_key)
        for row in connection.execute(query.order_by(events.c.sort_at, events.c.event_key))
    ]


def store_new(connection: Connection, target: str, found: Sequence[Finding], *, now: str, since: str) -> None:
    """Store the missing notifications about *found*.

    An event or VM can cause only a few notifications in the period from *since* to *now*. A faulty VM therefore cannot
    flood the targets.
    """
    table = notifications.c
    new = {each.id_for(target): each for each in found}
    for row in rows_in(connection, select(table.notification_id), table.notification_id, new):
        del new[row.notification_id]
    if not new:
        return
    counting = select(table.kind, table.subject, func.count().label("number"))
    counting = counting.where(table.target == target, table.made_at > since).group_by(table.kind, table.subject)
    counts = Counter({(row.kind, row.subject): row.number for row in connection.execute(counting)})
    alone = {each.vm_key for each in collapsed(connection, EventFilter(), now=now)}
    common = {"target": target, "made_at": now, "due_at": now, "attempts": 0, "is_done": False}
    rows = []
    for notification_id, each in new.items():
        is_limited = each.kind is Kind.AGENT_DISCONNECTED or each.subject in alone
        if counts[each.kind, each.subject] < (1 if is_limited else _MOST_OF_SUBJECT):
            counts[each.kind, each.subject] += 1
            values = {**msgspec.structs.asdict(each), "kind": each.kind.value, **common}
            rows.append({**values, "notification_id": notification_id})
    insert_missing(connection, notifications, rows)


def claim(connection: Connection, target: str, *, now: str, until: str) -> Notification | None:
    """Return the next due notification for *target*, claimed until *until*, or None."""
    table = notifications.c
    # The update checks the condition again, because another process might have claimed the row after the query.
    is_due = (table.target == target) & table.is_done.is_(False) & (table.due_at <= now)
    next_due = select(table.notification_id).where(is_due).order_by(table.due_at, table.notification_id).limit(1)
    taken = update(notifications).where(is_due, table.notification_id == next_due.scalar_subquery())
    taken = taken.values(due_at=until, attempts=table.attempts + 1)
    row = connection.execute(taken.returning(notifications)).first()
    if row is None:
        return None
    kind, vm_key = Kind(row.kind), row.occurrence if row.kind == Kind.AGENT_DISCONNECTED else ""
    query, occurrence = _query(kind, now)
    is_same = (events.c.event_key == row.event_key) & (occurrence == row.occurrence)
    found = connection.execute(query.add_columns(events.c.body).where(is_same)).first()
    event = None if found is None else summary_of(found.body)
    alone = [] if event is None else collapsed(connection, EventFilter(sole_vm_key=event.sole_vm_key or ""), now=now)
    return Notification(
        notification_id=row.notification_id,
        kind=kind,
        event=event if event is not None and event.event.event_id is not None else None,
        vm_key=vm_key,
        vm_name=vm_names(connection, [vm_key]).get(vm_key, vm_key),
        alone=sum(each.count for each in alone),
        attempts=row.attempts,
    )


def settle(connection: Connection, notification_id: str, *, is_done: bool, due_at: str) -> None:
    """Mark a notification as done, or schedule another attempt for *due_at*."""
    is_row = notifications.c.notification_id == notification_id
    connection.execute(update(notifications).where(is_row).values(is_done=is_done, due_at=due_at))


def delete_notifications(connection: Connection, *, before: str) -> None:
    """Delete notifications about ended events that are older than *before*."""
    is_open = exists().where(events.c.event_key == notifications.c.event_key, events.c.is_open.is_(True))
    connection.execute(delete(notifications).where(notifications.c.made_at < before, ~is_open))


def _query(kind: Kind, now: str) -> tuple[Select[Any], ColumnElement[str]]:
    """Return a query for events that need a notification, and the column of `occurrence`."""
    occurrence: ColumnElement[Any] = events.c.digest
    where: list[ColumnElement[bool]] = [events.c.is_open.is_(True)]
    where.append(func.coalesce(events.c.event_type, "").not_in(ADVISORY_EVENT_TYPES))
    of_event = decisions.c.event_key == events.c.event_key
    if kind is Kind.UNDECIDED:
        is_signed_elsewhere = exists().where(of_event, decisions.c.verdict_id.is_(None))
        where += [is_decision("undecided", now), ~is_signed_elsewhere]
    elif kind is Kind.SECOND_APPROVER:
        where.append(is_decision("waiting", now))
        occurrence = events.c.digest + "|" + events.c.decision_until
    elif kind is Kind.REFUSED:
        where.append(is_decision("refused", now))
        newest = select(func.max(decisions.c.decision_index)).where(of_event).correlate(events)
        occurrence = func.coalesce(cast(newest.scalar_subquery(), String), "")
    else:
        where.append(events.c.state == State.SCHEDULED.value)
        occurrence = event_vms.c.vm_key
    query = select(events.c.event_key, events.c.sole_vm_key, occurrence.label("occurrence")).where(*where)
    if kind is Kind.AGENT_DISCONNECTED:
        is_waiting = event_vms.c.is_member.is_(True) & event_vms.c.is_open.is_(True)
        query = query.join(event_vms, event_vms.c.event_key == events.c.event_key).where(is_waiting)
    return query, occurrence
