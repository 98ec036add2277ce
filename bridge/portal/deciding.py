"""Turns the verdicts of people into signed decisions.

When a person submits verdicts, the portal checks the person's permissions in the same database transaction that stores
the verdicts and the signed decisions. It then sends the decisions to the agents that have an open poll. An approval
fails if the event has changed since the person loaded the page.

The portal signs an approval only if at least one connected agent would act on it. `bridge.portal.verdicts`
determines how many people must approve.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Connection

from bridge.clock import format_time, parse_time
from bridge.portal.fleet import EventState
from bridge.portal.signing import addressees, decisions_for, why_unreachable
from bridge.portal.site import Site
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.store.decisions import NewDecision, newest_iat
from bridge.portal.store.verdicts import UNKNOWN_EVENT, AcceptedVerdict, VerdictRefused, add_verdicts
from bridge.portal.store.verdicts import withdraw as withdraw_verdict
from bridge.portal.store.vms import vms_of_event
from bridge.portal.users import Person, still
from bridge.portal.verdicts import NO_KEY, Choice, Outcome, Ruling, Verdict
from bridge.text import one_line

DEFAULT_VALID_SECONDS = 3_600.0
_MOST_REASON_CHARACTERS = 200


async def submit(
    site: Site,
    person: Person,
    choice: Choice,
    digests: Mapping[str, str],
    *,
    reason: str = "",
    valid_seconds: float = DEFAULT_VALID_SECONDS,
    confirmed: Mapping[str, Collection[str]] | None = None,
) -> list[AcceptedVerdict | VerdictRefused]:
    """Store the verdicts of *person* on the events whose keys are in *digests*.

    For each event, *digests* contains the digest of the version that the person saw. *confirmed* contains the names in
    Resources that the person confirms because no agent has confirmed them.

    The result contains a VerdictRefused in place of each verdict that was not stored. If all verdicts are refused for
    the same reason, the function raises VerdictRefused or AccessDenied instead.
    """
    if site.key is None:
        raise VerdictRefused(NO_KEY)
    now = site.clock.now()
    at = format_time(now)
    new = [
        Verdict(
            verdict_id=str(uuid.uuid4()),
            event_key=key,
            choice=choice,
            digest=digest,
            person_key=person.key,
            user_name=person.name,
            reason=one_line(reason.strip(), _MOST_REASON_CHARACTERS),
            made_at=at,
            expires_at=format_time(now + timedelta(seconds=valid_seconds)),
        )
        for key, digest in digests.items()
    ]
    results = await site.store.write(
        add_verdicts,
        new,
        at=at,
        required=site.required,
        sign=partial(_sign, site, now),
        allow=partial(_check, site, person, choice),
        confirmed=confirmed,
    )
    for each in results:
        if isinstance(each, AcceptedVerdict):
            announced = parse_time(each.event.first_observed_at)
            site.metrics.decision_seconds.observe(max(0.0, (now - announced).total_seconds()))
    with contextlib.suppress(StoreUnavailable):  # `PendingDecisions.follow` sends the decisions later
        await site.pending_decisions.catch_up()
    return results


async def withdraw(site: Site, person: Person, verdict_id: str) -> AcceptedVerdict:
    """Withdraw a verdict. Raise VerdictRefused or AccessDenied."""
    now = site.clock.now()
    taken = await site.store.write(
        withdraw_verdict,
        verdict_id,
        by=person,
        at=format_time(now),
        until=format_time(now + timedelta(seconds=DEFAULT_VALID_SECONDS)),
        required=site.required,
        sign=partial(_sign, site, now),
        allow=partial(_check, site, person, Choice.HOLD),
    )
    with contextlib.suppress(StoreUnavailable):  # `PendingDecisions.follow` sends the decisions later
        await site.pending_decisions.catch_up()
    return taken


def _check(site: Site, person: Person, choice: Choice, connection: Connection, event: EventState) -> None:
    """Check the current permissions of *person* in the transaction."""
    now = still(connection, person, at=format_time(site.clock.now()))
    if not now.may_see(event):
        raise VerdictRefused(UNKNOWN_EVENT, status=404)
    why_not = now.why_not_decide(event, is_hold=choice is Choice.HOLD)
    if why_not is not None:
        raise VerdictRefused(why_not, event=event, status=403)


def _sign(
    site: Site, now: datetime, connection: Connection, event: EventState, ruling: Ruling
) -> Sequence[NewDecision]:
    if site.key is None:
        return ()
    if ruling.outcome is Outcome.HELD:
        vm_keys = vms_of_event(connection, event)
    else:
        agents = site.connected_agents.of(vm.vm_key for vm in event.vms)
        vm_keys = [vm.vm_key for vm in addressees(event, agents, site.key.kid)]
        if not vm_keys:
            raise VerdictRefused(why_unreachable(event, agents, site.key.kid), event=event)
    newest = newest_iat(connection, event.key)
    return decisions_for(vm_keys, event, ruling, signer=site.key, now=now, newest_iat=newest)
