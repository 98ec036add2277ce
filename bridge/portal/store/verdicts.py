"""Stores each verdict and its signed decisions in one transaction.

Each transaction locks the event, then the decision counter, and then the audit counter. Transactions that store records
use the same order to avoid deadlocks. If two people decide on the same event at the same time, the second transaction
waits and then takes the first verdict into account.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import Connection, exists, select, update

from bridge.clock import format_time
from bridge.errors import BridgeError
from bridge.portal.audit import NewEntry
from bridge.portal.fleet import EventState, undecidable
from bridge.portal.schema import decisions, events, verdicts
from bridge.portal.store.audit import add_entries
from bridge.portal.store.decisions import NewDecision, add_decisions, lock_decisions, newest_iat
from bridge.portal.store.event_details import verdicts_of
from bridge.portal.store.events import event_of
from bridge.portal.store.users import barred_people
from bridge.portal.store.vms import vms_of_groups
from bridge.portal.two_person_rule import counting, lifts_needed, rule, with_lift
from bridge.portal.verdicts import WITHDRAW_HOLD, Choice, Lift, Outcome, Ruling, Verdict, people_of

UNKNOWN_EVENT = "No record reports this event."


class VerdictRefused(BridgeError):
    """The verdict is refused. *status* is 404 or 409."""

    def __init__(self, message: str, *, event: EventState | None = None, status: int = 409) -> None:
        super().__init__(message)
        self.event = event
        self.status = status


class AcceptedVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A stored verdict and its effect."""

    verdict: Verdict
    event: EventState
    ruling: Ruling
    sent_to: tuple[str, ...]
    """The VMs for which decisions were signed."""


#: Signs the decisions for an event, its ruling, the VMs of its resource groups, and the newest `iat` of the event.
Sign = Callable[[EventState, Ruling, Sequence[str], float], Sequence[NewDecision]]
#: Raises an error unless the person is allowed to decide on the event, as of this transaction.
Allow = Callable[[Connection, EventState], None]


def add_verdict(
    connection: Connection,
    new: Verdict,
    *,
    now: datetime,
    required: int,
    sign: Sign,
    allow: Allow = lambda *_: None,
    confirmed: Collection[str] = (),
) -> AcceptedVerdict:
    """Store *new* and its decisions, or raise VerdictRefused.

    *confirmed* contains the names in Resources that no agent confirms, and that the person confirms explicitly.
    """
    at = format_time(now)
    event = _locked_event(connection, new.event_key, at)
    allow(connection, event)
    _check(event, new, _counting(connection, new.event_key), at=at, confirmed=confirmed)
    connection.execute(verdicts.insert(), {**msgspec.structs.asdict(new), "choice": new.choice.value, "lifts": "[]"})
    ruling = rule(_counting(connection, new.event_key), digest=event.digest, at=at, required=required)
    signed: Sequence[NewDecision] = ()
    # A second hold is also signed, because the portal might know more VMs.
    if ruling.outcome is Outcome.APPROVED or new.choice is Choice.HOLD:
        signed = sign(event, ruling, _vms_of_event(connection, event), newest_iat(connection, event.key))
        lock_decisions(connection)
    _store_ruling(connection, event, ruling)
    add_entries(connection, [_entry(new, event, ruling)], at=at)
    if signed:
        add_decisions(connection, signed, at=at)
    sent_to = tuple(each.vm_key for each in signed)
    return AcceptedVerdict(verdict=new, event=event, ruling=ruling, sent_to=sent_to)


def withdraw(
    connection: Connection,
    verdict_id: str,
    *,
    by: Lift,
    now: datetime,
    required: int,
    sign: Sign,
    allow: Allow = lambda *_: None,
) -> AcceptedVerdict:
    """Withdraw a verdict. To stop a signed approval, sign a hold.

    If the verdict is the hold of another person, *required* people must withdraw it. Until then, store their consent.

    Raise VerdictRefused if the verdict is unknown or already withdrawn, or if the event is over.
    """
    key = connection.execute(select(verdicts.c.event_key).where(verdicts.c.verdict_id == verdict_id)).scalar()
    if key is None:
        raise VerdictRefused("This verdict does not exist.", status=404)
    at = format_time(now)
    event = _locked_event(connection, key, at)
    allow(connection, event)
    verdict = next(each for each in verdicts_of(connection, [key]) if each.verdict_id == verdict_id)
    lifts = with_lift(verdict, by, barred_people(connection), at=at)
    needed = 0 if verdict.withdrawn_at else lifts_needed(verdict, lifts, by=by.person_key, required=required)
    if needed:
        stored = {"lifts": msgspec.json.encode(lifts).decode()}
        connection.execute(update(verdicts).where(verdicts.c.verdict_id == verdict_id).values(stored))
        lock_decisions(connection)
        add_entries(connection, [_withdrawal(by, "agreed_to_lift", verdict)], at=at)
        ruling = Ruling(outcome=Outcome.HELD, verdicts=(verdict,), needed=needed)
        return AcceptedVerdict(verdict=verdict, event=event, ruling=ruling, sent_to=())
    is_first = (verdicts.c.verdict_id == verdict_id) & verdicts.c.withdrawn_at.is_(None)
    if connection.execute(update(verdicts).where(is_first).values(withdrawn_at=at)).rowcount != 1:
        raise VerdictRefused("The verdict is already withdrawn.", event=event)
    if not event.is_open:
        raise VerdictRefused(f"Too late: {event.undecidable_because}.", event=event)
    has_decisions = verdict.choice is Choice.APPROVE and _has_decisions(connection, verdict)
    ruling = Ruling(outcome=Outcome.HELD if has_decisions else Outcome.UNDECIDED, verdicts=(verdict,), needed=0)
    newest = newest_iat(connection, event.key)
    signed = sign(event, ruling, _vms_of_event(connection, event), newest) if has_decisions else ()
    _store_ruling(connection, event, rule(_counting(connection, key), digest=event.digest, at=at, required=required))
    lock_decisions(connection)
    add_entries(connection, [_withdrawal(by, "withdrew", verdict)], at=at)
    if signed:
        add_decisions(connection, signed, at=at)
    sent_to = tuple(each.vm_key for each in signed)
    return AcceptedVerdict(verdict=verdict, event=event, ruling=ruling, sent_to=sent_to)


def _counting(connection: Connection, event_key: str) -> tuple[Verdict, ...]:
    return counting(verdicts_of(connection, [event_key]), barred_people(connection))


def _has_decisions(connection: Connection, verdict: Verdict) -> bool:
    """Return whether the portal signed a decision for *verdict*, alone or with others.

    A decision row refers only to its last verdict.
    """
    same = (verdicts.c.event_key == verdict.event_key) & (verdicts.c.digest == verdict.digest)
    approvals = same & (verdicts.c.choice == Choice.APPROVE.value)
    sent_to = exists().where(decisions.c.verdict_id == verdicts.c.verdict_id)
    own = verdicts.c.verdict_id == verdict.verdict_id
    return connection.execute(select(verdicts.c.verdict_id).where(own | approvals, sent_to)).first() is not None


def _locked_event(connection: Connection, key: str, at: str) -> EventState:
    connection.execute(select(events.c.event_key).where(events.c.event_key == key).with_for_update())
    event = event_of(connection, key, now=at)
    if event is None:
        raise VerdictRefused(UNKNOWN_EVENT, status=404)
    return event


def _check(event: EventState, new: Verdict, said: Sequence[Verdict], *, at: str, confirmed: Collection[str]) -> None:
    if new.choice is Choice.HOLD:
        if (
            not event.is_open or event.event.event_id is None or event.event.is_advisory
        ):  # the report of one VM never prevents a hold
            raise VerdictRefused(undecidable(event), event=event)
        return
    if event.undecidable_because is not None:
        raise VerdictRefused(undecidable(event), event=event)
    if new.digest != event.digest:
        raise VerdictRefused("The event has changed since you loaded the page.", event=event)
    ruling = rule(said, digest=event.digest, at=at, required=1)
    if ruling.outcome is Outcome.HELD:
        # The approval would count after the withdrawal of the hold, but the portal would not sign a decision.
        raise VerdictRefused(f"The event is held by {people_of(ruling.verdicts)}. {WITHDRAW_HOLD}", event=event)
    unconfirmed = [name for name in event.unconfirmed if name not in confirmed]
    if unconfirmed:
        raise VerdictRefused(
            f"No agent confirms {', '.join(unconfirmed)}. To approve the event, confirm each of these names.",
            event=event,
        )


def _store_ruling(connection: Connection, event: EventState, ruling: Ruling) -> None:
    """Store the ruling in the row of the event, for the filters of the pages."""
    is_decided = ruling.outcome is not Outcome.UNDECIDED
    until = None if ruling.outcome is Outcome.HELD else min((each.expires_at for each in ruling.verdicts), default=None)
    values = {
        "decision": ruling.outcome.value if is_decided else None,
        "decision_digest": event.digest,
        "decision_until": until,
        "is_refused": False,
    }
    connection.execute(update(events).where(events.c.event_key == event.key).values(**values))


def _vms_of_event(connection: Connection, event: EventState) -> list[str]:
    """Return the VMs of the event and of the resource groups of its members."""
    members = [vm for vm in event.vms if vm.is_member] or event.vms
    places = {(vm.vm.subscription_id or "", vm.vm.resource_group) for vm in members if vm.vm.resource_group}
    found = dict.fromkeys(vm.vm_key for vm in event.vms)
    return list(found | dict.fromkeys(vms_of_groups(connection, [(each, group or "") for each, group in places])))


def _withdrawal(by: Lift, action: str, verdict: Verdict) -> NewEntry:
    details = {
        "verdict_id": verdict.verdict_id,
        "verdict": verdict.choice.value,
        "of": verdict.user_name,
        "person": by.person_key,
    }
    return NewEntry(actor=by.user_name, action=action, subject=verdict.event_key, details=details)


def _entry(new: Verdict, event: EventState, ruling: Ruling) -> NewEntry:
    return NewEntry(
        actor=new.user_name,
        action="approved" if new.choice is Choice.APPROVE else "held",
        subject=new.event_key,
        details={
            "verdict_id": new.verdict_id,
            "person": new.person_key,
            "event_id": event.event.event_id,
            "event_digest": new.digest,
            "reason": new.reason,
            "outcome": ruling.outcome.value,
            "resources": list(event.event.resources or ()),
        },
    )
