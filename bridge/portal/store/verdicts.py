"""Stores a person's verdicts and the resulting signed decisions in one transaction.

To avoid deadlocks, each transaction locks the events first, then the decision counter, and then the audit counter, in
the same order as transactions that store records. If two people decide on the same event at the same time, the second
transaction waits and then takes the first verdict into account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from sqlalchemy import Connection, select, update

from bridge.portal.audit import Entry
from bridge.portal.fleet import EventState, undecidable
from bridge.portal.requests import RequestRefused
from bridge.portal.schema import decisions, events, verdicts
from bridge.portal.store.audit import add_entries
from bridge.portal.store.decisions import NewDecision, decision_hashes, insert_decisions
from bridge.portal.store.event_details import verdicts_of
from bridge.portal.store.events import event_of, events_of
from bridge.portal.store.fold import lock_events
from bridge.portal.store.users import barred_people
from bridge.portal.users import Person
from bridge.portal.verdicts import WITHDRAW_HOLD, Choice, Outcome, Ruling, Verdict, counting, lift, people_of, rule
from bridge.portal.vm_state import place_of

UNKNOWN_EVENT = "No record reports this event."
_CHANGED = "The event has changed since you loaded the page."
_ONE_OF_GROUP = "Approve one of them, and wait until it has ended."


class VerdictRefused(RequestRefused):
    """The verdict is refused. *status* is 403, 404, or 409."""

    def __init__(self, message: str, *, event: EventState | None = None, status: int = 409) -> None:
        super().__init__(status, message)
        self.event = event


class AcceptedVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A stored verdict and its effect."""

    verdict: Verdict
    event: EventState
    ruling: Ruling
    signed: Sequence[NewDecision] = ()

    @property
    def sent_to(self) -> tuple[str, ...]:
        """Return the VMs for which decisions were signed."""
        return tuple(each.vm_key for each in self.signed)


#: Returns the signed decisions for the ruling on an event.
Sign = Callable[[Connection, EventState, Ruling], Sequence[NewDecision]]
#: Raises an error unless the person is currently allowed to decide on the event.
Allow = Callable[[Connection, EventState], None]


def add_verdicts(
    connection: Connection,
    new: Sequence[Verdict],
    *,
    at: str,
    required: int,
    sign: Sign,
    allow: Allow = lambda *_: None,
    confirmed: Mapping[str, Collection[str]] | None = None,
) -> list[AcceptedVerdict | VerdictRefused]:
    """Store the verdicts of one person on different events.

    The verdicts share one audit entry, which lists their decisions. If a verdict is refused, the result contains a
    VerdictRefused in its place, and the others are still stored. However, if the verdicts approve two events of the
    same group, the function raises VerdictRefused and stores none of them.

    *confirmed* maps an event's key to the names in Resources that no agent confirmed, but that the person did.
    """
    names = confirmed or {}
    keys = sorted({each.event_key for each in new})
    lock_events(connection, keys)
    found, said = events_of(connection, keys, now=at), _counting(connection, keys)
    results: list[AcceptedVerdict | VerdictRefused] = []
    for each in new:
        try:
            event = _allowed(connection, found.get(each.event_key), allow)
            earlier = said.get(event.key, ())
            _check(event, each, earlier, at=at, confirmed=names.get(event.key, ()), is_only=len(new) == 1)
            ruling = rule((*earlier, each), digest=event.digest, at=at, required=required)
            signed: Sequence[NewDecision] = ()
            # Sign a second hold too, because more VMs might have reported since the first hold.
            if ruling.outcome is Outcome.APPROVED or each.choice is Choice.HOLD:
                signed = sign(connection, event, ruling)
            results.append(AcceptedVerdict(verdict=each, event=event, ruling=ruling, signed=signed))
        except VerdictRefused as refused:
            results.append(refused)
    accepted = [each for each in results if isinstance(each, AcceptedVerdict)]
    if not accepted:
        return results
    if new[0].choice is Choice.APPROVE:
        _check_groups([each.event for each in accepted])
    given = [msgspec.structs.asdict(each.verdict) for each in accepted]
    connection.execute(verdicts.insert(), [{**row, "choice": row["choice"].value, "lifts": "{}"} for row in given])
    for stored in accepted:
        _store_ruling(connection, stored.event, stored.ruling)
    insert_decisions(connection, [decision for each in accepted for decision in each.signed], at=at)
    add_entries(connection, [_entry(accepted)], at=at)
    return results


def withdraw(
    connection: Connection,
    verdict_id: str,
    *,
    by: Person,
    at: str,
    until: str,
    required: int,
    sign: Sign,
    allow: Allow = lambda *_: None,
) -> AcceptedVerdict:
    """Withdraw a verdict. To stop an approval that is already signed, sign a hold.

    To withdraw another person's hold, *required* people must agree. As long as more people must agree, the function
    only stores the consent of *by*, which expires at the time *until*.

    Raise VerdictRefused if the verdict is unknown or already withdrawn, or if the event is over.
    """
    key = connection.execute(select(verdicts.c.event_key).where(verdicts.c.verdict_id == verdict_id)).scalar()
    if key is None:
        raise VerdictRefused("This verdict does not exist.", status=404)
    lock_events(connection, [key])
    event = _allowed(connection, event_of(connection, key, now=at), allow)
    verdict = next(each for each in verdicts_of(connection, [key]) if each.verdict_id == verdict_id)
    if verdict.withdrawn_at is not None:
        raise VerdictRefused("The verdict is already withdrawn.", event=event)
    if not event.is_open:
        raise VerdictRefused(f"Too late: {event.undecidable_because}.", event=event)
    lifts, needed = lift(verdict, by.key, barred_people(connection), at=at, until=until, required=required)
    if needed:
        stored = {"lifts": msgspec.json.encode(lifts).decode()}
        connection.execute(update(verdicts).where(verdicts.c.verdict_id == verdict_id).values(stored))
        add_entries(connection, [_withdrawal(by, "agreed_to_lift", verdict, ())], at=at)
        ruling = Ruling(outcome=Outcome.HELD, verdicts=(verdict,), needed=needed)
        return AcceptedVerdict(verdict=verdict, event=event, ruling=ruling)
    connection.execute(update(verdicts).where(verdicts.c.verdict_id == verdict_id).values(withdrawn_at=at))
    has_decisions = verdict.choice is Choice.APPROVE and _has_decisions(connection, verdict)
    ruling = Ruling(outcome=Outcome.HELD if has_decisions else Outcome.UNDECIDED, verdicts=(verdict,), needed=0)
    signed = sign(connection, event, ruling) if has_decisions else ()
    said = _counting(connection, [key]).get(key, ())
    _store_ruling(connection, event, rule(said, digest=event.digest, at=at, required=required))
    insert_decisions(connection, signed, at=at)
    add_entries(connection, [_withdrawal(by, "withdrew", verdict, signed)], at=at)
    return AcceptedVerdict(verdict=verdict, event=event, ruling=ruling, signed=signed)


def _counting(connection: Connection, keys: Sequence[str]) -> dict[str, tuple[Verdict, ...]]:
    barred, found = barred_people(connection), defaultdict[str, list[Verdict]](list)
    for verdict in verdicts_of(connection, keys):
        found[verdict.event_key].append(verdict)
    return {key: counting(of_event, barred) for key, of_event in found.items()}


def _has_decisions(connection: Connection, approval: Verdict) -> bool:
    """Return whether the portal signed a decision that includes *approval*.

    A decision refers only to its newest verdict. The function therefore looks for decisions that refer to any approval
    of the same version of the event.
    """
    is_same = (verdicts.c.event_key == approval.event_key) & (verdicts.c.digest == approval.digest)
    query = select(verdicts.c.verdict_id).join(decisions, decisions.c.verdict_id == verdicts.c.verdict_id)
    query = query.where(is_same, verdicts.c.choice == Choice.APPROVE.value).limit(1)
    return connection.execute(query).first() is not None


def _allowed(connection: Connection, event: EventState | None, allow: Allow) -> EventState:
    if event is None:
        raise VerdictRefused(UNKNOWN_EVENT, status=404)
    allow(connection, event)
    return event


def _check(
    event: EventState, new: Verdict, said: Sequence[Verdict], *, at: str, confirmed: Collection[str], is_only: bool
) -> None:
    has_changed = new.digest != event.digest
    if has_changed and not is_only:
        raise VerdictRefused(_CHANGED, event=event)
    if new.choice is Choice.HOLD:
        # The report of one VM never prevents a hold.
        if not event.is_open or event.event.event_id is None or event.event.is_advisory:
            raise VerdictRefused(undecidable(event), event=event)
        return
    if event.undecidable_because is not None:
        raise VerdictRefused(undecidable(event), event=event)
    if has_changed:
        raise VerdictRefused(_CHANGED, event=event)
    ruling = rule(said, digest=event.digest, at=at, required=1)
    if ruling.outcome is Outcome.HELD:
        # If the hold is withdrawn, the approval would count, but the portal would not sign a decision.
        raise VerdictRefused(f"The event is held by {people_of(ruling.verdicts)}. {WITHDRAW_HOLD}", event=event)
    unconfirmed = [name for name in event.unconfirmed if name not in confirmed]
    if unconfirmed:
        raise VerdictRefused(
            f"No agent has confirmed that the event affects {', '.join(unconfirmed)}. To approve the event, confirm "
            "each of these names.",
            event=event,
        )


def _check_groups(approved: Sequence[EventState]) -> None:
    """Raise VerdictRefused if two of the events affect the same scale set or group."""
    first: dict[tuple[str, ...], EventState] = {}
    for event in approved:
        for vm in (each.vm for each in event.vms if each.is_member and each.vm.resource_group):
            other = first.setdefault((*place_of(vm), (vm.scale_set or "").casefold()), event)
            if other is not event:
                group = f"scale set {vm.scale_set}" if vm.scale_set else f"resource group {vm.resource_group}"
                ids = f"{other.event.event_id} and {event.event.event_id}"
                raise VerdictRefused(f"The events {ids} affect VMs of the same group ({group}). {_ONE_OF_GROUP}")


def _store_ruling(connection: Connection, event: EventState, ruling: Ruling) -> None:
    """Store the ruling in the event's row, so that pages can filter by it."""
    is_decided = ruling.outcome is not Outcome.UNDECIDED
    until = None if ruling.outcome is Outcome.HELD else min((each.expires_at for each in ruling.verdicts), default=None)
    values = {
        "decision": ruling.outcome.value if is_decided else None,
        "decision_digest": event.digest,
        "decision_until": until,
        "decided_by": people_of(ruling.verdicts),
        "needed": ruling.needed,
        "is_refused": False,
    }
    connection.execute(update(events).where(events.c.event_key == event.key).values(**values))


def _withdrawal(by: Person, action: str, verdict: Verdict, signed: Sequence[NewDecision]) -> Entry:
    details = {
        "verdict_id": verdict.verdict_id,
        "verdict": verdict.choice.value,
        "of": verdict.user_name,
        "person": by.key,
        "decisions": decision_hashes(signed),
    }
    return Entry(actor=by.name, action=action, subject=verdict.event_key, details=details)


def _entry(accepted: Sequence[AcceptedVerdict]) -> Entry:
    verdict = accepted[0].verdict
    members = [
        {
            "event_key": each.event.key,
            "event_id": each.event.event.event_id,
            "event_digest": each.verdict.digest,
            "resources": list(each.event.event.resources or ()),
            "resource_group": "/".join(place_of(max(each.event.vms, key=lambda vm: vm.is_member).vm)),
            "verdict_id": each.verdict.verdict_id,
            "outcome": each.ruling.outcome.value,
            "decisions": decision_hashes(each.signed),
        }
        for each in accepted
    ]
    return Entry(
        actor=verdict.user_name,
        action="approved" if verdict.choice is Choice.APPROVE else "held",
        subject=verdict.event_key if len(members) == 1 else "",
        details={"person": verdict.person_key, "reason": verdict.reason, "events": members},
    )
