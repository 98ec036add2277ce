"""`approve EVENT_ID`: a person on this VM approves one event, with the same checks and the same records as a portal.

With an agent running, the decision is written into its outbox and the agent does the rest. With none, the command takes
the directory's lock and runs an agent of its own for a moment, with the sinks but without rules and portal. Either way
the outcome is read from the stored decision.

What is approved is the event as it was shown: if Azure changes it between the question and the answer, nothing happens.
So it is with holds: one that arrives while the question stands was not shown, and stops the approval.

Who may write to the outbox owns this VM, so such an approval ends a hold and needs no second person. That is said,
asked for, and in the record: it is never done by `--yes` alone.

As root the command runs no agent on a directory of another user, since the outbox that root leaves there is one that
the agent cannot use; and no sink that starts a program, since that would run outside of the agent's own unit, with the
rights and the environment of whoever asks. The records of such a sink wait for the agent.
"""

from __future__ import annotations

import getpass
import os
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bridge.agent.agent import Agent
from bridge.approval.digest import digest
from bridge.cli.second_agent import refuse_second_agent
from bridge.cli.stderr import say
from bridge.cli.terminal import this_command
from bridge.config.loader import Settings
from bridge.errors import BridgeError, StateDirectoryError
from bridge.events.event import ScheduledEvent
from bridge.events.record import Verdict
from bridge.outbox.approvals import ApprovalResult, StoredDecision, cli_decision
from bridge.outbox.locks import DirectoryLock
from bridge.outbox.reader import OutboxFile
from bridge.text import EXCERPT_CHARACTERS, escaped, one_line

if sys.platform != "win32":
    import pwd

#: A decision that no agent has taken up by then is not approved later, without the person.
_VALID_SECONDS = 120.0
_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.1
_APPROVED = frozenset({ApprovalResult.ACCEPTED.value, ApprovalResult.ALREADY_APPROVED.value})


class ApprovalsNotConfigured(BridgeError):
    """Nothing may be approved on this VM."""


class WouldOverrule(BridgeError):
    """Somebody else decided otherwise, and nobody said that this is meant."""


class NoSuchEvent(BridgeError):
    """The event cannot be approved, because it is not there as it should be."""


def approve(settings: Settings, directory: Path, event_id: str, *, yes: bool, overrule: bool) -> int:
    """Approve *event_id* after asking, unless *yes*; print what came of it and return the exit code.

    Raise WouldOverrule when *yes* would end a hold or stand for several approvers, unless *overrule*.
    """
    if settings.approval is None:
        raise ApprovalsNotConfigured(
            "Approvals are not configured: there is no [approval] table, so this agent never posts anything. "
            "Add an empty [approval] table to allow them."
        )
    with _agent(settings, directory) as tick, OutboxFile(directory) as outbox:
        event = _event(outbox, event_id, wait_seconds=0.0 if tick is None else _ANSWER_SECONDS)
        click.echo(describe(event), err=True)
        shown_at = time.time()
        holds = _holds(outbox, event)
        overruled = _overruled(settings, holds)
        say(*overruled)
        if yes and overruled and not overrule:
            raise WouldOverrule(f"{' '.join(overruled)} Say that this is meant with --overrule.")
        if not yes:
            question = (
                "Overrule that, and approve it for all of these?" if overruled else "Approve it for all of these?"
            )
            click.confirm(question, abort=True, err=True)
        decision = cli_decision(
            approver=_user(),
            decision_id=str(uuid.uuid4()),
            event=event,
            event_digest=digest(event),
            valid_seconds=_VALID_SECONDS,
            reason=one_line(" ".join(overruled), EXCERPT_CHARACTERS) or None,
            issued_at=shown_at,
        )
        came = outbox.decide(decision, [hold.arrival for hold in holds])
        if came:
            names = " and ".join(f"the hold of {each}" for each in _by_approver(came))
            raise WouldOverrule(escaped(f"Meanwhile came {names}. Nothing was approved; ask again to overrule that."))
        return _outcome(outbox, decision, tick)


def _holds(outbox: OutboxFile, event: ScheduledEvent) -> list[StoredDecision]:
    """Return the holds on *event* as they are now."""
    decisions = outbox.snapshot().decisions
    return [each for each in decisions if each.event_id == event.event_id and each.verdict is Verdict.HOLD]


def _by_approver(holds: Iterable[StoredDecision]) -> list[str]:
    """Return who holds and why, by each approver's newest hold."""
    newest = {each.approver: each for each in sorted(holds, key=lambda hold: hold.issued_at)}
    return [f"{each.approver}: {each.reason}" if each.reason else each.approver for each in newest.values()]


def _overruled(settings: Settings, holds: Iterable[StoredDecision]) -> list[str]:
    """Return a sentence for each approver whose *holds* an approval here ends, and for those it does not wait for."""
    sentences = [f"This overrules the hold of {each}." for each in _by_approver(holds)]
    remote = None if settings.approval is None else settings.approval.remote
    if remote is not None and remote.required_approvals > 1:
        sentences.append(f"This overrules required_approvals = {remote.required_approvals}: nobody else is asked.")
    return sentences


def describe(event: ScheduledEvent) -> str:
    """Return what approving *event* means: every VM, the type, the time."""
    when = "at an unknown time" if event.not_before is None else f"not before {event.not_before:%Y-%m-%d %H:%M:%S} UTC"
    lasts = "" if event.duration_seconds is None else f", for about {event.duration_seconds} s"
    names = event.resources or ()
    lines = [
        f"{event.event_type or 'Event'} {event.event_id} ({event.event_source or 'unknown source'}): {when}{lasts}.",
        *([event.description] if event.description else []),
        f"Approving it is consent for every VM it names ({len(names)}), and it may start at once:",
        *(f"  {name}" for name in names),
    ]
    return "\n".join(map(escaped, lines))


@contextmanager
def _agent(settings: Settings, directory: Path) -> Iterator[Callable[[], None] | None]:
    """Yield None when an agent runs; without one, run one, and yield the function that keeps it going."""
    try:
        if directory.exists():
            DirectoryLock(directory).release()
    except StateDirectoryError:
        yield None
        return
    refuse_second_agent(
        settings, directory, advice="Approve there, with sudo if it is the service's agent, or name its --config."
    )
    _refuse_for_root(directory)
    waiting = _program_sinks(settings)
    if waiting:
        names = ", ".join(sorted(waiting))
        say(f"Root runs no programs here: what {names} should get waits for the agent.")
    agent = Agent(settings, directory, on_request_only=True, without_sinks=waiting)
    agent.start()
    try:
        yield agent.run_due
    finally:
        agent.stop()


def _refuse_for_root(directory: Path) -> None:
    """Raise StateDirectoryError when we are root and what we would write into *directory* the agent could not use."""
    if not _is_root():
        return
    try:
        owner = directory.stat().st_uid
    except OSError as error:
        raise StateDirectoryError(
            f"No agent runs on {directory}, and it cannot be looked at: {error.strerror}. What root makes there, the "
            "agent's user could not use. Start the agent, or make the directory and give it to that user."
        ) from error
    if owner != 0:
        user = _name_of(owner)
        command = f"{this_command()} {shlex.join(sys.argv[1:])}"
        how = f": runuser -u {user} -- {command}" if user != _nameless(owner) else "."  # runuser takes names only
        raise StateDirectoryError(
            f"No agent runs on {directory}, which belongs to {user}; what root writes there, {user} could not use. "
            f"Start the agent, or ask as {user}{how}"
        )


def _program_sinks(settings: Settings) -> frozenset[str]:
    """Return the names of the sinks that start programs, if we are root; else none."""
    found = (sink.name for sink in settings.sinks if sink.sink_class.send_test_by_name_only)
    return frozenset(found if _is_root() else ())


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return _nameless(uid)


def _nameless(uid: int) -> str:
    return f"uid {uid}"


def _event(outbox: OutboxFile, event_id: str, *, wait_seconds: float) -> ScheduledEvent:
    """Return the event as the agent knows it; an agent just started needs a moment for its first answer."""
    deadline = time.monotonic() + wait_seconds
    pause = threading.Event()
    while True:
        document = outbox.state().document
        events = [event for event in (document.events if document else ()) if event.event_id == event_id]
        if len(events) == 1 and events[0].event_status == "Scheduled":
            return events[0]
        if time.monotonic() >= deadline:
            break
        pause.wait(_POLL_SECONDS)
    if events:
        status = escaped(events[0].event_status)
        raise NoSuchEvent(f"The event {escaped(event_id)} is {status}; only a Scheduled one can be approved.")
    there = ", ".join(escaped(event.event_id or "") for event in document.events) if document else ""
    raise NoSuchEvent(f"This VM has no event {event_id!r}. There: {there or 'none'}.")


def _user() -> str:
    """Return the system's user who asks; behind sudo also the one who called it, as sudo says."""
    if sys.platform == "win32":
        return getpass.getuser()
    name = _name_of(os.getuid())  # not getpass, which trusts the environment
    caller = os.environ.get("SUDO_USER")
    return f"{name} ({caller})" if caller and os.getuid() == 0 else name


def _outcome(outbox: OutboxFile, decision: StoredDecision, tick: Callable[[], None] | None) -> int:
    """Wait for the outcome, print it, and return the exit code."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    pause = threading.Event()
    while time.monotonic() < deadline:
        if tick is not None:
            tick()
        found = outbox.decision(decision)
        if found is not None and found.outcome is not None:
            return _print(found)
        pause.wait(_POLL_SECONDS)
    say(
        "Nothing has come of it yet. A running agent goes on trying until the event starts, changes or is held; "
        "`events` shows what becomes of it."
    )
    return 1


def _print(found: StoredDecision) -> int:
    if found.outcome in _APPROVED:
        click.echo(escaped(f"approved: {found.message}"))
        return 0
    say(f"not approved ({found.outcome}): {found.message}")
    return 1
