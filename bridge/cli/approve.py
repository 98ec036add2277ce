"""Implements the `approve EVENT_ID` command, which approves an event on this VM.

The command shows the event, sends an approval to the running agent, and waits for the result. The agent validates the
approval like a decision from a portal, and then posts it to Azure. If the event changes or is put on hold after the
command has shown it, the agent does not approve the event.

The command can overrule a hold, or approve without the required second person, because anyone who can run it already
controls the VM. In both cases, `--yes` (which skips the confirmation prompt) works only with `--overrule`.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterable

import click

from bridge.agent.control_requests import decide, find_decision, read_status
from bridge.agent.control_socket import ControlClient, NoAgent
from bridge.approval.digest import digest
from bridge.cli.connect import advice
from bridge.cli.terminal import complain, say
from bridge.config.approval import ApprovalSettings
from bridge.config.loader import Settings, state_directory
from bridge.errors import BridgeError
from bridge.events.event import NO_EFFECT, Document, ScheduledEvent
from bridge.events.record import ApprovalResult, Verdict
from bridge.exit_codes import ExitCode
from bridge.outbox.rows import StoredDecision
from bridge.system.permissions import user_name
from bridge.text import EXCERPT_CHARACTERS, escaped, one_line

#: The decision expires after this time. By then, the person no longer waits for the result.
_VALID_SECONDS = 120.0
_OUTCOME_SECONDS = 30.0
_POLL_SECONDS = 0.1
_APPROVED = frozenset({ApprovalResult.ACCEPTED.value, ApprovalResult.ALREADY_APPROVED.value})


def approve(settings: Settings, event_id: str, *, yes: bool, overrule: bool) -> int:
    """Approve an event, and return the exit code."""
    if settings.approval is None:
        raise BridgeError(
            "Approvals are not configured. To allow them, add an empty [approval] table to the configuration."
        )
    directory = state_directory(settings, os.environ)
    agent = ControlClient(directory)
    try:
        status = agent.ask(read_status)
    except NoAgent as error:
        raise NoAgent(f"{error} {advice(directory)}") from error
    event = _event(status.document, event_id)
    click.echo(describe(event), err=True)
    shown_at = time.time()
    holds = [each for each in status.decisions if each.event_id == event_id and each.verdict is Verdict.HOLD]
    overruled = _overruled(settings.approval, holds)
    say(*overruled)
    if yes and overruled and not overrule:
        raise BridgeError(f"{' '.join(overruled)} To approve the event anyway, add --overrule.")
    if not yes:
        click.confirm(
            "Overrule this and approve the event?" if overruled else "Approve this event?", abort=True, err=True
        )
    decision = cli_decision(
        approver=_user(),
        decision_id=str(uuid.uuid4()),
        event=event,
        reason=one_line(" ".join(overruled), EXCERPT_CHARACTERS) or None,
        issued_at=shown_at,
    )
    others = agent.change(decide, decision=decision, overruled=tuple(hold.arrival for hold in holds))
    if others:
        names = " and ".join(f"the hold of {each}" for each in _by_approver(others))
        raise BridgeError(escaped(f"Nothing was approved, because {names} arrived. Run the command again."))
    return _outcome(agent, decision)


def cli_decision(
    *,
    approver: str,
    decision_id: str,
    event: ScheduledEvent,
    valid_seconds: float = _VALID_SECONDS,
    reason: str | None = None,
    issued_at: float | None = None,
) -> StoredDecision:
    """Return an approval, which a hold newer than *issued_at* (Unix seconds) overrides."""
    now = time.time()
    return StoredDecision(
        source="cli",
        approver=approver,
        decision_id=decision_id,
        payload_sha256=decision_id,
        event_id=event.event_id or "",
        event_digest=digest(event),
        verdict=Verdict.APPROVE,
        issued_at=int((now if issued_at is None else issued_at) * 1_000_000),
        expires_at=now + valid_seconds,
        reason=reason,
        received_at=now,
    )


def _by_approver(holds: Iterable[StoredDecision]) -> list[str]:
    newest = {each.approver: each for each in sorted(holds, key=lambda hold: hold.issued_at)}
    return [f"{each.approver}: {each.reason}" if each.reason else each.approver for each in newest.values()]


def _overruled(approval: ApprovalSettings, holds: Iterable[StoredDecision]) -> list[str]:
    """Return a warning for each hold that the approval overrules, and for missing approvers."""
    sentences = [f"This overrules the hold of {each}." for each in _by_approver(holds)]
    needed = 1 if approval.remote is None else approval.remote.required_approvals
    if needed > 1:
        sentences.append(f"This overrules required_approvals = {needed}: one approver is enough.")
    return sentences


def describe(event: ScheduledEvent) -> str:
    """Return the event and the effect of an approval."""
    when = "at an unknown time" if event.not_before is None else f"not before {event.not_before:%Y-%m-%d %H:%M:%S} UTC"
    lasts = "" if event.duration_seconds is None else f", for about {event.duration_seconds} s"
    names = event.resources or ()
    lines = [
        f"{event.event_type or 'Event'} {event.event_id} ({event.event_source or 'unknown source'}): {when}{lasts}.",
        *([event.description] if event.description else []),
        f"After an approval, Azure may start the event at once for all of its VMs ({len(names)}):",
        *(f"  {name}" for name in names),
    ]
    return "\n".join(map(escaped, lines))


def _event(document: Document | None, event_id: str) -> ScheduledEvent:
    known = () if document is None else document.events
    events = [event for event in known if event.event_id == event_id]
    if any(event.is_advisory for event in events):
        raise BridgeError(f"The event {escaped(event_id)} cannot be approved. {NO_EFFECT}")
    if len(events) == 1 and events[0].event_status == "Scheduled":
        return events[0]
    if events:
        status = escaped(events[0].event_status)
        raise BridgeError(f"The event {escaped(event_id)} is {status}. Only a Scheduled event can be approved.")
    names = ", ".join(escaped(event.event_id or "") for event in known)
    raise BridgeError(f"Unknown event {event_id!r}. Known events: {names or 'none'}.")


def _user() -> str:
    name = user_name()
    caller = os.environ.get("SUDO_USER")
    return f"{name} ({caller})" if caller and sys.platform != "win32" and os.getuid() == 0 else name


def _outcome(agent: ControlClient, decision: StoredDecision) -> int:
    """Wait for the outcome, print it, and return the exit code."""
    deadline = time.monotonic() + _OUTCOME_SECONDS
    while time.monotonic() < deadline:
        found = agent.ask(find_decision, approver=decision.approver, decision_id=decision.decision_id)
        if found is None or found.outcome is None:
            time.sleep(_POLL_SECONDS)
        elif found.outcome in _APPROVED:
            click.echo(escaped(f"approved: {found.message}"))
            return ExitCode.OK
        else:
            return complain(f"not approved ({found.outcome}): {found.message}", code=ExitCode.FAILED)
    return complain(
        f"No result after {_OUTCOME_SECONDS:g} s. The agent keeps trying until the event starts or changes, or until "
        "someone holds the event. The log of the agent gives the reason. To see the result, run `events`.",
        code=ExitCode.FAILED,
    )
