"""The report of `status`: its shape, which is the JSON of `status --json`, and how it is built.

Keys are stable, and units are in their names. It comes from the outbox, what its agent answers, and the configuration;
a fact that only a running agent knows is None when none answers, and nothing is guessed. Pure but for the files beside
the outbox: the caller asks the agent and says what time it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path

import msgspec

from bridge.approval.digest import digest
from bridge.approval.files import agent_user, unsafe_files
from bridge.approval.submit import is_disabled
from bridge.clock import format_time, parse_time
from bridge.config.loader import Settings, configuration_in_words
from bridge.config.trusted_keys import unusable_keys
from bridge.events.diff import is_over
from bridge.events.event import ScheduledEvent, names_vm
from bridge.events.record import Evidence, Transition, TransitionRecord, Verdict
from bridge.health.client import AgentAnswer
from bridge.health.readiness import STUCK_SECONDS, Readiness, directory_text
from bridge.outbox.approvals import ApprovalStage, DecisionStage, PendingApproval, StoredDecision
from bridge.outbox.database import DATABASE
from bridge.outbox.deliveries import SinkAccount
from bridge.outbox.reader import Snapshot

SCHEMA_VERSION = 1


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an agent runs here, and how it is."""

    running: bool | None
    """None: it cannot be seen."""
    ready: bool | None
    reasons: tuple[str, ...]
    """Why it is not ready."""
    version: str | None
    asked: str | None
    """The URL; None when nobody was asked."""
    problem: str | None
    """Why there is no answer to be believed."""


class VmReport(msgspec.Struct, frozen=True, kw_only=True):
    """This virtual machine."""

    name: str | None
    vm_id: str | None


class ImdsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata service, as the agent sees it."""

    endpoint: str | None
    last_good_poll_at: str | None
    last_good_poll_seconds_ago: float | None
    last_good_poll_is_live: bool
    """False: as it was stored last, which a running agent does every ten minutes, with each change, and on its stop."""


class AsideReport(msgspec.Struct, frozen=True, kw_only=True):
    """A database that was set aside."""

    name: str
    bytes: int


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state directory."""

    directory: str
    stream_id: str
    in_memory: bool
    """True: the disk refuses; the events and errors here are from before, the sinks' counts as the agent says."""
    loading: bool
    """True: the agent is still loading this outbox, so all here is from before; it works from memory meanwhile."""
    approvals_disabled: bool
    approvals_unsafe: tuple[str, ...]
    """Which files that decide who may approve others may write to: while there is one, nothing is approved."""
    unusable_keys: tuple[str, ...]
    """Which trusted keys hold no key now: their decisions do not count."""
    outbox_bytes: int
    max_bytes: int | None
    set_aside: tuple[AsideReport, ...]


class ConfigurationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which configuration is in force."""

    file: str | None
    """The one that this command reads; None: there is none, so the defaults, or a directory without one was named."""
    looked_for: str | None
    """Where it was looked for, when there is none."""
    agent_file: str | None
    """The one that the running agent has; "" when it runs on the defaults, None when it does not say."""
    version: str
    """Of this command; `agent` has that of the agent."""


class TransitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of an event that Azure made."""

    transition: Transition
    evidence: Evidence
    observed_at: str
    seconds_ago: float


class ApprovalReport(msgspec.Struct, frozen=True, kw_only=True):
    """An approval of the event as it is now."""

    state: ApprovalStage
    source: str
    approvers: tuple[str, ...]
    attempts: int
    http_status: int | None
    changed_at: str


class DecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A decision on the event as it is now that is not finished with, or holds it."""

    state: DecisionStage
    source: str
    approver: str
    verdict: Verdict
    reason: str | None
    expires_at: str


class EventReport(ScheduledEvent, frozen=True, kw_only=True):
    """An active event as the document has it, and what the agent knows of it."""

    seconds_to_not_before: float | None
    """Negative once it has passed."""
    affects_this_vm: bool | None
    last_transition: TransitionReport | None
    approval: ApprovalReport | None
    decisions: tuple[DecisionReport, ...]


class SinkReport(SinkAccount, frozen=True, kw_only=True):
    """One sink: its account, and why it has not got what is pending or parked."""

    name: str
    configured: bool | None
    """None: the configuration is not known."""
    oldest_pending_seconds: float
    last_error: str | None
    last_error_at: str | None
    needs_attention: bool | None
    """None: only a running agent knows."""

    @property
    def is_stuck(self) -> bool:
        """Return whether its oldest record has waited for too long."""
        return self.oldest_pending_seconds > STUCK_SECONDS


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    schema_version: int = SCHEMA_VERSION
    at: str
    known_at: str | None
    """When the outbox learned something last: what it says of an agent that is down is of then."""
    agent: AgentReport
    vm: VmReport
    imds: ImdsReport
    state: StateReport
    configuration: ConfigurationReport
    configuration_problem: str | None
    events: tuple[EventReport, ...]
    sinks: tuple[SinkReport, ...]


def build_report(
    snapshot: Snapshot,
    *,
    directory: Path,
    is_locked: bool | None,
    in_memory: bool,
    answer: AgentAnswer,
    settings: Settings | None,
    configuration_problem: str | None,
    now: datetime,
) -> StatusReport:
    """Return the report. *is_locked*: an agent runs on the directory; *in_memory*: one has marked it as not current."""
    live = answer.readiness
    vm_name = _vm_name(snapshot, live, settings)
    shown = () if snapshot.stored.document is None else snapshot.stored.document.events
    events = tuple(event for event in shown if not is_over(event))
    return StatusReport(
        at=format_time(now),
        known_at=_known_at(snapshot),
        agent=AgentReport(
            running=True if live is not None else is_locked,
            ready=None if live is None else live.is_ready,
            reasons=() if live is None else live.reasons,
            version=None if live is None else live.version,
            asked=answer.url,
            problem=None if is_locked is False and answer.is_silent else answer.problem,
        ),
        vm=VmReport(name=vm_name, vm_id=snapshot.stored.vm.vm_id if snapshot.stored.vm is not None else None),
        imds=_imds(snapshot, live, settings, now),
        state=_state(snapshot, live, settings, directory=directory, in_memory=in_memory),
        configuration=_configuration(live, settings),
        configuration_problem=configuration_problem,
        events=tuple(_event(event, snapshot, vm_name, now) for event in sorted(events, key=_urgency)),
        sinks=tuple(_sinks(snapshot, live, settings, now)),
    )


def _configuration(live: Readiness | None, settings: Settings | None) -> ConfigurationReport:
    file = None if settings is None or settings.file is None else str(settings.file.absolute())
    is_without = settings is not None and file is None
    return ConfigurationReport(
        file=file,
        looked_for=configuration_in_words(None, os.environ) if is_without else None,
        agent_file=None if live is None else live.configuration,
        version=version("scheduled-events-bridge"),
    )


def _vm_name(snapshot: Snapshot, live: Readiness | None, settings: Settings | None) -> str | None:
    stored = snapshot.stored.vm.name if snapshot.stored.vm is not None else None
    return (live.vm if live is not None else None) or (settings.vm.name if settings is not None else None) or stored


def _known_at(snapshot: Snapshot) -> str | None:
    good = snapshot.stored.last_good_at
    moments = [
        snapshot.newest_record_at,
        None if good is None else good.timestamp(),
        *(error.at for error in snapshot.last_errors.values()),
    ]
    known = [moment for moment in moments if moment is not None]
    return _time(max(known)) if known else None


def _imds(snapshot: Snapshot, live: Readiness | None, settings: Settings | None, now: datetime) -> ImdsReport:
    if live is not None:
        return ImdsReport(
            endpoint=live.imds,
            last_good_poll_at=live.last_good_poll_at,
            last_good_poll_seconds_ago=live.last_good_poll_seconds_ago,
            last_good_poll_is_live=True,
        )
    good = snapshot.stored.last_good_at
    return ImdsReport(
        endpoint=None if settings is None else settings.imds.endpoint,
        last_good_poll_at=None if good is None else format_time(good),
        last_good_poll_seconds_ago=None if good is None else _seconds(now - good),
        last_good_poll_is_live=False,
    )


def _state(
    snapshot: Snapshot, live: Readiness | None, settings: Settings | None, *, directory: Path, in_memory: bool
) -> StateReport:
    aside = sorted(
        path
        for path in directory.glob(f"{DATABASE}.*-*")
        if not path.name.endswith(("-wal", "-shm")) and not path.name.startswith((f"{DATABASE}-wal", f"{DATABASE}-shm"))
    )
    approval = None if settings is None else settings.approval
    return StateReport(
        directory=directory_text(directory),
        stream_id=snapshot.stored.stream_id,
        in_memory=in_memory or (live is not None and live.state_in_memory),
        loading=live is not None and live.state_loading,
        approvals_disabled=is_disabled(directory),
        approvals_unsafe=_unsafe(settings, directory),
        unusable_keys=() if approval is None else unusable_keys(approval.trusted_keys()),
        outbox_bytes=sum(_bytes(directory / f"{DATABASE}{suffix}") for suffix in ("", "-wal")),
        max_bytes=None if settings is None else settings.state.max_bytes,
        set_aside=tuple(AsideReport(name=path.name, bytes=_bytes(path)) for path in aside),
    )


def _unsafe(settings: Settings | None, directory: Path) -> tuple[str, ...]:
    if settings is None or settings.approval is None:
        return ()
    keys = settings.approval.trusted_keys()
    return unsafe_files(keys, configuration=settings.file, directory=directory, users={agent_user(directory)})


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _urgency(event: ScheduledEvent) -> tuple[bool, float]:
    """Return what sorts events: what has begun, then the soonest."""
    is_ahead = event.event_status == "Scheduled"
    return is_ahead, float("inf") if event.not_before is None else event.not_before.timestamp()


def _event(event: ScheduledEvent, snapshot: Snapshot, vm_name: str | None, now: datetime) -> EventReport:
    key = event.event_id and (event.event_id, digest(event))
    approvals = [each for each in snapshot.approvals if each.key == key and each.state is not ApprovalStage.OVER]
    decisions = [each for each in snapshot.decisions if each.key == key or _holds(each, event)]
    return EventReport(
        **{name: getattr(event, name) for name in ScheduledEvent.__struct_fields__},
        seconds_to_not_before=None if event.not_before is None else _seconds(event.not_before - now),
        affects_this_vm=names_vm(event, vm_name),
        last_transition=_last_transition(snapshot.last_records.get(event.key, ()), now),
        approval=_approval(approvals[-1]) if approvals else None,
        decisions=tuple(map(_decision, decisions)),
    )


def _holds(decision: StoredDecision, event: ScheduledEvent) -> bool:
    return decision.state is DecisionStage.ON_HOLD and decision.event_id == event.event_id


def _last_transition(records: Sequence[TransitionRecord], now: datetime) -> TransitionReport | None:
    for record in records:
        if record.approval is None:
            return TransitionReport(
                transition=record.transition,
                evidence=record.evidence,
                observed_at=record.observed_at,
                seconds_ago=_seconds(now - parse_time(record.observed_at)),
            )
    return None


def _approval(approval: PendingApproval) -> ApprovalReport:
    return ApprovalReport(
        state=approval.state,
        source=approval.source,
        approvers=approval.approvers,
        attempts=approval.attempts,
        http_status=approval.http_status,
        changed_at=_time(approval.changed_at),
    )


def _decision(decision: StoredDecision) -> DecisionReport:
    return DecisionReport(
        state=decision.state,
        source=decision.source,
        approver=decision.approver,
        verdict=decision.verdict,
        reason=decision.reason,
        expires_at=_time(decision.expires_at),
    )


def _sinks(
    snapshot: Snapshot, live: Readiness | None, settings: Settings | None, now: datetime
) -> Iterator[SinkReport]:
    """Yield the configured sinks in their order, then the others that the outbox or the agent knows."""
    configured = [] if settings is None else [sink.name for sink in settings.sinks]
    by_agent = {} if live is None else live.sinks
    for name in dict.fromkeys([*configured, *snapshot.sinks, *by_agent]):
        answer, error = by_agent.get(name), snapshot.last_errors.get(name)
        # An agent that is still loading this outbox knows less of it than is read here.
        is_read_here = answer is None or (live is not None and live.state_loading and name in snapshot.sinks)
        account = answer if answer is not None and not is_read_here else snapshot.sinks.get(name, SinkAccount())
        waited_seconds = max(now.timestamp() - snapshot.oldest_pending_at.get(name, now.timestamp()), 0.0)
        yield SinkReport(
            **{field: getattr(account, field) for field in SinkAccount.__struct_fields__},
            name=name,
            configured=None if settings is None else name in configured,
            oldest_pending_seconds=round(waited_seconds, 3)
            if answer is None or is_read_here
            else answer.oldest_pending_seconds,
            last_error=None if error is None else error.message,
            last_error_at=None if error is None else _time(error.at),
            needs_attention=None if answer is None else answer.needs_attention,
        )


def _time(timestamp_seconds: float) -> str:
    return format_time(datetime.fromtimestamp(timestamp_seconds, timezone.utc))


def _seconds(span: timedelta) -> float:
    return round(span.total_seconds(), 3)
