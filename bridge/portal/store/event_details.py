"""Reads the data that the pages show about events.

The event, its verdicts, its decisions, and its outcomes are read in one transaction, so they are consistent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import Connection, func, select

from bridge.approval.digest import digest as digest_of
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.fleet import EventState
from bridge.portal.schema import audit, decisions, event_vms, events, records, verdicts
from bridge.portal.store.audit import entries
from bridge.portal.store.database import rows_in
from bridge.portal.store.events import events_of, records_of
from bridge.portal.store.users import all_users
from bridge.portal.verdicts import Choice, Verdict, counting, most_of_one_issuer
from bridge.portal.vm_state import record_of, vm_key

_OUTCOMES = tuple(each.value for each in (Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED))
_MOST_OPEN = 1_000
_MOST_ENTRIES = 1_000
_lifts_of = msgspec.json.Decoder(dict[str, str]).decode


class SignedDecision(msgspec.Struct, frozen=True):
    """A decision that agents receive."""

    index: int
    event_key: str
    vm_key: str
    choice: Choice
    made_at: str
    expires_at_seconds: int
    jws_sha256: str
    verdict_id: str | None = None
    """The newest verdict behind the decision, or None if the decision was signed elsewhere."""


class EventDetails(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its verdicts, decisions, and outcomes."""

    event: EventState
    verdicts: tuple[Verdict, ...] = ()
    counting: tuple[Verdict, ...] = ()
    decisions: tuple[SignedDecision, ...] = ()
    approvers: int = 0
    names: Mapping[str, str] = {}
    """The names of the known people by their keys."""
    outcomes: tuple[TransitionRecord, ...] = ()
    """The outcome records from the event's members, and from VMs that a decision is for."""


class Marks(msgspec.Struct, frozen=True):
    """Values that change whenever a page changes."""

    entry: int
    open_events: dict[str, str]


def event_details_of(connection: Connection, keys: Sequence[str], *, now: str) -> list[EventDetails]:
    """Return the details of the known events with *keys*, in the order of *keys*."""
    found = events_of(connection, keys, now=now)
    given: dict[str, list[Verdict]] = defaultdict(list)
    signed: dict[str, list[SignedDecision]] = defaultdict(list)
    outcomes: dict[str, list[TransitionRecord]] = defaultdict(list)
    for verdict in verdicts_of(connection, found):
        given[verdict.event_key].append(verdict)
    for decision in _decisions(connection, found):
        signed[decision.event_key].append(decision)
    for key, outcome in _outcomes(connection, found):
        outcomes[key].append(outcome)
    people, approvers = all_users(connection), approvers_here(connection)
    barred = {each.person_key for each in people if not each.can_approve}
    names = {each.person_key: each.user_name for each in people}
    return [
        EventDetails(
            event=found[key],
            verdicts=tuple(given[key]),
            counting=counting(given[key], barred),
            decisions=tuple(signed[key]),
            approvers=approvers,
            names=names,
            outcomes=tuple(_counted([*outcomes[key], *_outcomes_without_event(connection, signed[key])], signed[key])),
        )
        for key in keys
        if key in found
    ]


def verdicts_of(connection: Connection, keys: Iterable[str]) -> list[Verdict]:
    """Return the verdicts on the events *keys*, oldest first."""
    query = select(verdicts).order_by(verdicts.c.made_at, verdicts.c.verdict_id)
    return [
        Verdict(**{**row._asdict(), "choice": Choice(row.choice), "lifts": _lifts_of(row.lifts)})
        for row in rows_in(connection, query, verdicts.c.event_key, keys)
    ]


def event_with_digest(connection: Connection, key: str, digest: str) -> TransitionRecord | None:
    """Return the newest record of the event *key* with *digest*, or None."""
    for body in reversed(records_of(connection, key)):
        record = record_of(body)
        if record.event is not None and digest_of(record.event) == digest:
            return record
    return None


def approvers_here(connection: Connection) -> int:
    """Return the number of known people who can approve an event together."""
    return most_of_one_issuer(user.person_key for user in all_users(connection) if user.can_approve)


def marks(connection: Connection) -> Marks:
    """Return the values that change whenever a page changes."""
    query = select(events.c.event_key, events.c.body).where(events.c.is_open.is_(True), events.c.body.is_not(None))
    newest = query.order_by(events.c.sort_at, events.c.event_key).limit(_MOST_OPEN)
    last = int(connection.execute(select(func.max(audit.c.entry))).scalar_one() or 0)
    return Marks(last, {row.event_key: row.body for row in connection.execute(newest)})


def subjects_after(connection: Connection, entry: int) -> set[str]:
    """Return the events and other subjects of the audit entries after the number *entry*."""
    return {key for each in entries(connection, after=entry, limit=_MOST_ENTRIES) for key in each.event_keys}


def open_events_of_vms(connection: Connection, vm_keys: Iterable[str]) -> set[str]:
    """Return the keys of the open events that *vm_keys* report."""
    query = select(event_vms.c.event_key).where(event_vms.c.is_open.is_(True))
    return {row.event_key for row in rows_in(connection, query, event_vms.c.vm_key, vm_keys)}


def _decisions(connection: Connection, keys: Iterable[str]) -> list[SignedDecision]:
    of = decisions.c
    query = select(of.decision_index, of.event_key, of.vm_key, of.decision, of.made_at, of.expires_at_seconds)
    query = query.add_columns(of.jws_sha256, of.verdict_id).order_by(of.decision_index)
    rows = rows_in(connection, query, of.event_key, keys)
    return [SignedDecision(index, key, vm, Choice(choice), *rest) for index, key, vm, choice, *rest in rows]


def _outcomes(connection: Connection, keys: Iterable[str]) -> Iterable[tuple[str, TransitionRecord]]:
    """Yield outcomes that come from members of the event or from recipients of its decisions.

    Outcomes from other VMs do not count.
    """
    members = select(event_vms.c.vm_key).where(
        event_vms.c.event_key == records.c.event_key, event_vms.c.is_member.is_(True)
    )
    audience = select(decisions.c.vm_key).where(decisions.c.event_key == records.c.event_key)
    is_sender = records.c.vm_key.in_(members.union(audience))
    query = select(records.c.event_key, records.c.body).where(records.c.transition.in_(_OUTCOMES), is_sender)
    query = query.order_by(records.c.observed_at, records.c.sequence)
    for row in rows_in(connection, query, records.c.event_key, keys):
        yield row.event_key, record_of(row.body)


def _outcomes_without_event(connection: Connection, signed: Sequence[SignedDecision]) -> list[TransitionRecord]:
    if not signed:
        return []
    recipients = select(decisions.c.vm_key).where(decisions.c.event_key == signed[0].event_key)
    query = select(records.c.body).where(records.c.event_key.is_(None), records.c.transition.in_(_OUTCOMES))
    found = query.where(records.c.vm_key.in_(recipients)).order_by(records.c.observed_at)
    return list(map(record_of, connection.execute(found).scalars()))


def _counted(outcomes: Iterable[TransitionRecord], signed: Sequence[SignedDecision]) -> Iterable[TransitionRecord]:
    """Yield outcomes of rules, and outcomes of decisions signed for the VM that reports them."""
    audience = {each.jws_sha256: each.vm_key for each in signed}
    for record in outcomes:
        hashes = () if record.approval is None else record.approval.jws_sha256
        is_own = any(audience.get(each) == vm_key(record) for each in hashes)
        if is_own or (record.event is not None and not hashes):
            yield record
