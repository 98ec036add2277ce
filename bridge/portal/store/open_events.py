"""Lists and counts open events, in the order in which Azure starts them.

Events with a future NotBefore come first, ordered by NotBefore. All others follow, newest first. Pages for people begin
with the approved events, because an agent starts them within seconds.

If one VM is the only reporter of more than two open events, these events do not appear in the lists and counts.
Instead, `collapsed` returns one line for that VM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, case, func, or_, select

from bridge.portal.fleet import summary_of
from bridge.portal.schema import event_groups, event_vms, events, vms
from bridge.portal.store.database import rows_in
from bridge.portal.store.events import (
    DECISIONS,
    PAGE,
    EventFilter,
    Line,
    LinePage,
    Wave,
    conditions,
    cursor_parts,
    is_decision,
    is_soon,
    vms_of,
)

#: The list contains at most this number of open events that only one VM reports.
_MOST_ALONE = 2
#: A wave with at least this number of events has one line.
_LEAST_OF_WAVE = 5
_REVERSED = str.maketrans("0123456789", "9876543210")


class Collapsed(msgspec.Struct, frozen=True, kw_only=True):
    """A VM that alone reports more than two open events."""

    vm_key: str
    name: str
    count: int


def list_lines(
    connection: Connection,
    wanted: EventFilter,
    *,
    now: str,
    limit: int = PAGE,
    cursor: str | None = None,
    has_waves: bool = True,
    approved_first: bool = True,
) -> LinePage:
    """Return a page of open events in the order in which Azure starts them.

    A wave of five or more events is shown as one line, unless *wanted* selects that wave. Approved events that come
    first are not part of a wave. The cursor contains the time when the first page was read, so all pages use the same
    order. A program that reads all pages needs *approved_first* = False, because an approval would move an event.
    """
    at, first, place = now, 1, None
    if cursor is not None:
        first, at, *place = cursor_parts(cursor, 5)
    where = open_conditions(wanted, now=now)
    decision = case(*((is_decision(each, now), each) for each in DECISIONS[:-1]), else_=None)
    names = ("event_key", "sort_at", "wave", "decided_by", "is_refused")
    columns = (*(events.c[name] for name in names), decision.label("decision"))
    rows: list[Any] = list(connection.execute(select(*columns).where(*where)))
    early = {row.event_key for row in rows if approved_first and row.decision == "approved" and not row.is_refused}

    def place_of(row: Any) -> tuple[str, str, str]:
        return ("0", row.sort_at, row.event_key) if row.event_key in early else _place(row, at)

    may_share = has_waves and wanted.wave is None
    sizes = Counter(row.wave for row in rows if may_share and row.wave and row.event_key not in early)
    lines: dict[str, list[Any]] = {}
    for row in sorted(rows, key=place_of):
        is_shared = row.event_key not in early and sizes[row.wave] >= _LEAST_OF_WAVE
        lines.setdefault(row.wave if is_shared else row.event_key, []).append(row)
    left = [each for each in lines.values() if place is None or place_of(each[0]) > tuple(place)]
    shown = _lines_of(connection, left[:limit])
    following = None
    if len(left) > limit:
        following = "~".join([str(first + limit), at, *place_of(left[limit - 1][0])])
    return LinePage(lines=shown, total=len(lines), events=len(rows), first=first, cursor=following)


def _place(row: Any, at: str) -> tuple[str, str, str]:
    """Return the sort key of an event: future events first, then all others, newest first."""
    if row.sort_at > at:
        return "1", row.sort_at, row.event_key
    return "2", row.sort_at.translate(_REVERSED), row.event_key


def _lines_of(connection: Connection, found: Sequence[Sequence[Any]]) -> tuple[Line, ...]:
    names = ("event_key", "body", "decided_by", "needed", "is_refused")
    keys = [rows[0].event_key for rows in found]
    query = select(*(events.c[name] for name in names))
    details = {row.event_key: row for row in rows_in(connection, query, events.c.event_key, keys)}
    vms_of_event = vms_of(connection, [row.event_key for rows in found if len(rows) > 1 for row in rows])
    return tuple(
        Line(
            event=summary_of(details[rows[0].event_key].body),
            decision=rows[0].decision,
            decided_by=details[rows[0].event_key].decided_by or "",
            needed=details[rows[0].event_key].needed or 0,
            is_refused=bool(details[rows[0].event_key].is_refused),
            wave=_wave_of(rows, vms_of_event) if len(rows) > 1 else None,
        )
        for rows in found
    )


def _wave_of(rows: Sequence[Any], vms_of_event: Mapping[str, Collection[str]]) -> Wave:
    of_decision = Counter(row.decision for row in rows)
    decisions = {name: of_decision[name] for name in DECISIONS if of_decision[name]}
    different = {vm for row in rows for vm in vms_of_event.get(row.event_key, ())}
    held_by = ", ".join(sorted({row.decided_by or "" for row in rows if row.decision == "held"}))
    return Wave(key=rows[0].wave, events=len(rows), vms=len(different), decisions=decisions, held_by=held_by)


def count_open(connection: Connection, wanted: EventFilter, *, now: str) -> dict[str, int]:
    """Return the number of open events for each filter of the page header.

    The names are ``total``, each of `DECISIONS`, ``soon`` (`EventFilter.is_soon`), and ``undecided_soon``.
    """
    counted = {each: is_decision(each, now) for each in DECISIONS}
    counted |= {"soon": is_soon(now), "undecided_soon": is_soon(now) & counted["undecided"]}
    columns = [func.sum(case((condition, 1), else_=0)).label(name) for name, condition in counted.items()]
    columns.append(func.count().label("total"))
    query = select(*columns).select_from(events).where(*open_conditions(wanted, now=now))
    return {name: int(value or 0) for name, value in connection.execute(query).one()._asdict().items()}


def numbers(connection: Connection, *, now: str) -> tuple[int, int, dict[str, int]]:
    """Return the values for the metrics: the known VMs, the open events, and the counts."""
    is_open = select(func.count()).select_from(events).where(events.c.is_open.is_(True))
    known_vms = select(func.count()).select_from(vms).where(vms.c.body.is_not(None))
    of_vms, of_events = (int(connection.execute(query).scalar_one()) for query in (known_vms, is_open))
    return of_vms, of_events, count_open(connection, EventFilter(), now=now)


def collapsed(connection: Connection, wanted: EventFilter, *, now: str) -> list[Collapsed]:
    """Return each VM that is the only reporter of more than two open events."""
    where = [*conditions(wanted, now=now), events.c.is_open.is_(True), events.c.sole_vm_key.in_(_alone())]
    query = select(events.c.sole_vm_key, vms.c.name, func.count().label("number")).where(*where)
    query = query.outerjoin(vms, vms.c.vm_key == events.c.sole_vm_key).group_by(events.c.sole_vm_key, vms.c.name)
    rows = connection.execute(query.order_by(vms.c.name))
    return [Collapsed(vm_key=row.sole_vm_key, name=row.name or row.sole_vm_key, count=row.number) for row in rows]


def affected_vms(connection: Connection, wanted: EventFilter, *, now: str) -> set[str]:
    """Return the members of the open events."""
    query = select(event_vms.c.vm_key).join(events, events.c.event_key == event_vms.c.event_key)
    members = query.where(*open_conditions(wanted, now=now), event_vms.c.is_member.is_(True))
    return set(connection.execute(members).scalars())


def _alone() -> Any:
    """Return a subquery for the VMs that are the only reporters of more than two open events."""
    is_alone = (events.c.is_open.is_(True)) & events.c.sole_vm_key.is_not(None)
    query = select(events.c.sole_vm_key).where(is_alone).group_by(events.c.sole_vm_key)
    return query.having(func.count() > _MOST_ALONE)


def open_conditions(wanted: EventFilter, *, now: str) -> list[ColumnElement[bool]]:
    """Return the conditions of open events, without the events of `collapsed`."""
    found = [*conditions(wanted, now=now), events.c.is_open.is_(True)]
    if wanted.sole_vm_key is None:
        found.append(or_(events.c.sole_vm_key.is_(None), events.c.sole_vm_key.not_in(_alone())))
    return found


def filter_values(connection: Connection, prefixes: Iterable[str], *, scope: tuple[str, ...]) -> dict[str, list[str]]:
    """Return at most `PAGE` groups of open events for each of *prefixes*, such as ``region:``.

    The result omits the groups of `collapsed` events. Only one VM reports these events, and it might have made them up.
    """
    is_open = select(events.c.event_key).where(*open_conditions(EventFilter(scope=scope), now=""))
    query = select(event_groups.c.name).distinct().where(event_groups.c.event_key.in_(is_open))
    names = sorted(connection.execute(query).scalars())
    return {prefix: [each for each in names if each.startswith(prefix)][:PAGE] for prefix in prefixes}
