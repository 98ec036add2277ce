"""Stores each verdict and its signed decisions in one transaction.

Each transaction locks the event, then the decision counter, and then the audit counter. Transactions that store records
use the same order to avoid deadlocks. If two people decide on the same event at the same time, the second transaction
waits and then takes the first verdict into account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import Connection, exists, select, update

from bridge.clock import format_time
from bridge.errors import BridgeError
from bridge.events.event import VmIdentity
from bridge.portal.audit import NewEntry
from bridge.portal.decision_progress import accepted_approval
from bridge.portal.fleet import EventState, State, undecidable
from bridge.portal.schema import decisions, events, verdicts
from bridge.portal.store.audit import add_entries
from bridge.portal.store.decisions import NewDecision, add_decisions, lock_decisions
from bridge.portal.store.event_details import details_of, known_vms, verdicts_of
from bridge.portal.store.events import event_of
from bridge.portal.store.users import barred_people
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


#: Signs the decisions for an event, its ruling, and the VMs of its resource groups.
Sign = Callable[[EventState, Ruling, Sequence[str]], Sequence[NewDecision]]
#: Raises an error unless the person is allowed to decide on the event, as of this transaction.
Allow = Callable[[Connection, EventState], None]


def add_verdict(
    connection: Connection, new: Verdict, *, now: datetime, required: int, sign: Sign, allow: Allow = lambda *_: None
) -> AcceptedVerdict:
    """Store *new* and its decisions, or raise VerdictRefused."""
    at = format_time(now)
    event = _locked_event(connection, new.event_key)
    allow(connection, event)
    _check(event, new, _counting(connection, new.event_key), at=at)
    if new.choice is Choice.HOLD:
        _refuse_too_late(connection, event)
    connection.execute(verdicts.insert(), {**msgspec.structs.asdict(new), "choice": new.choice.value, "lifts": "[]"})
    ruling = rule(_counting(connection, new.event_key), digest=event.digest, at=at, required=required)
    signed: Sequence[NewDecision] = ()
    # A second hold is also signed, because the portal might know more VMs.
    if ruling.outcome is Outcome.APPROVED or new.choice is Choice.HOLD:
        signed = sign(event, ruling, _vms_of_groups(connection, event))
        lock_decisions(connection)
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
    required: int,
    now: datetime,
    sign: Sign,
    allow: Allow = lambda *_: None,
) -> AcceptedVerdict:
    """Withdraw a verdict. To stop a signed approval, sign a hold.

    If the verdict is the hold of another person, *required* people must withdraw it. Until then, store their consent.

    Raise VerdictRefused if the verdict is unknown or already withdrawn, or if it is too late to stop the event.
    """
    key = connection.execute(select(verdicts.c.event_key).where(verdicts.c.verdict_id == verdict_id)).scalar()
    if key is None:
        raise VerdictRefused("This verdict does not exist.", status=404)
    event = _locked_event(connection, key)
    allow(connection, event)
    at = format_time(now)
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
    if event.state is not State.SCHEDULED:
        raise VerdictRefused(f"Too late: {event.undecidable_because}.", event=event)
    _refuse_too_late(connection, event)
    has_decisions = verdict.choice is Choice.APPROVE and _has_decisions(connection, verdict)
    ruling = Ruling(outcome=Outcome.HELD if has_decisions else Outcome.UNDECIDED, verdicts=(verdict,), needed=0)
    signed = sign(event, ruling, _vms_of_groups(connection, event)) if has_decisions else ()
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


def _locked_event(connection: Connection, key: str) -> EventState:
    connection.execute(select(events.c.event_key).where(events.c.event_key == key).with_for_update())
    event = event_of(connection, key)
    if event is None:
        raise VerdictRefused(UNKNOWN_EVENT, status=404)
    return event


def _check(event: EventState, new: Verdict, said: Sequence[Verdict], *, at: str) -> None:
    if event.undecidable_because is not None:
        raise VerdictRefused(undecidable(event), event=event)
    if new.choice is Choice.APPROVE and new.digest != event.digest:
        raise VerdictRefused("The event has changed since you loaded the page.", event=event)
    ruling = rule(said, digest=event.digest, at=at, required=1)
    if new.choice is Choice.APPROVE and ruling.outcome is Outcome.HELD:
        # The approval would count after the withdrawal of the hold, but the portal would not sign a decision.
        raise VerdictRefused(f"The event is held by {people_of(ruling.verdicts)}. {WITHDRAW_HOLD}", event=event)


def _refuse_too_late(connection: Connection, event: EventState) -> None:
    """Raise VerdictRefused if Azure has accepted an approval of *event*."""
    sent_to = accepted_approval(details_of(connection, [event])[0])
    if sent_to is not None:
        raise VerdictRefused(sent_to.sentence, event=event)


def _vms_of_groups(connection: Connection, event: EventState) -> list[str]:
    own = [vm.vm_key for vm in event.vms]
    groups = {_group(vm.vm) for vm in event.vms} - {None}
    found = dict.fromkeys(own)
    found |= {each.vm_key: None for each in known_vms(connection) if _group(each.vm) in groups}
    return list(found)


def _group(vm: VmIdentity) -> tuple[str, str] | None:
    return ((vm.subscription_id or "").casefold(), vm.resource_group.casefold()) if vm.resource_group else None


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
