"""The report of `status`: its structure, which is the JSON of `status --json`, and the function that builds it.

Keys are stable, and each name contains its unit. A value that only a running agent knows is null without an agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path

import msgspec

from bridge.agent.requests import StatusAnswer
from bridge.approval.digest import digest
from bridge.clock import format_time, parse_time
from bridge.events.diff import is_over
from bridge.events.event import ScheduledEvent, names_vm
from bridge.events.record import Evidence, Transition, TransitionRecord, Verdict
from bridge.health.readiness import STUCK_SECONDS, directory_text
from bridge.outbox.approvals import DISABLED_FILE
from bridge.outbox.rows import ApprovalStage, DecisionStage, PendingApproval, SinkRow, StoredDecision

SCHEMA_VERSION = 1


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The running agent."""

    running: bool
    ready: bool | None
    reasons: tuple[str, ...]
    """The reasons why the agent is not ready."""
    version: str | None


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
    """False: the value is from the file, which the agent does not update after each poll."""


class BehindReport(msgspec.Struct, frozen=True, kw_only=True):
    """A file that does not contain all changes."""

    reason: str
    seconds: float


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """One file and its size, including its WAL."""

    name: str
    bytes: int


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state directory."""

    directory: str
    stream_id: str
    behind: BehindReport | None
    """Set while the outbox cannot be saved. The agent then continues from memory and approves nothing."""
    approvals_disabled: bool
    approvals_unsafe: tuple[str, ...]
    """Files that users other than root and the agent's user can change. Nothing is approved because of them."""
    unusable_keys: tuple[str, ...]
    """Trusted keys that cannot be used. Decisions that are signed with them do not count."""
    outbox_bytes: int
    max_bytes: int | None
    kept_files: tuple[FileReport, ...]
    """Outbox files of earlier generations."""


class ConfigurationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in use."""

    file: str | None
    """The file that this command reads. Null: no file was found, or it does not belong to the state directory."""
    looked_for: str | None
    """The searched locations if no file was found."""
    agent_file: str | None
    """The file of the running agent. Empty: the agent uses the defaults. Null: no agent is running."""
    version: str
    """The version of this command."""


class TransitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of an event by Azure."""

    transition: Transition
    evidence: Evidence
    observed_at: str
    seconds_ago: float


class ApprovalReport(msgspec.Struct, frozen=True, kw_only=True):
    """An approval of the current version of an event."""

    state: ApprovalStage
    source: str
    approvers: tuple[str, ...]
    attempts: int
    http_status: int | None
    changed_at: str


class DecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """An open decision on the current version of an event, or a hold on the event."""

    state: DecisionStage
    source: str
    approver: str
    verdict: Verdict
    reason: str | None
    expires_at: str


class EventReport(ScheduledEvent, frozen=True, kw_only=True):
    """An active event."""

    seconds_to_not_before: float | None
    """Negative after NotBefore."""
    affects_this_vm: bool | None
    last_transition: TransitionReport | None
    approval: ApprovalReport | None
    decisions: tuple[DecisionReport, ...]


class SinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of one sink, and its last error."""

    name: str
    configured: bool | None
    """Null: the configuration is unknown."""
    accepted: int
    delivered: int
    pending: int
    parked: int
    expired: int
    evicted: int
    discarded: int
    oldest_pending_seconds: float
    last_error: str | None
    last_error_at: str | None
    needs_attention: bool | None

    @property
    def is_stuck(self) -> bool:
        """Return whether the oldest record has been pending for too long."""
        return self.oldest_pending_seconds > STUCK_SECONDS


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The complete report."""

    schema_version: int = SCHEMA_VERSION
    at: str
    known_at: str | None
    """The time of the newest stored fact. Without an agent, the report describes the state at this time."""
    agent: AgentReport
    vm: VmReport
    imds: ImdsReport
    state: StateReport
    configuration: ConfigurationReport
    configuration_problem: str | None
    events: tuple[EventReport, ...]
    sinks: tuple[SinkReport, ...]


class LocalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that this command reads from the configuration."""

    file: str | None = None
    looked_for: str | None = None
    problem: str | None = None
    """The reason why the configuration is unknown."""
    sinks: tuple[str, ...] | None = None
    vm_name: str | None = None
    imds_endpoint: str | None = None
    max_bytes: int | None = None
    approvals_unsafe: tuple[str, ...] = ()
    unusable_keys: tuple[str, ...] = ()


def build_report(answer: StatusAnswer, *, directory: Path, local: LocalFacts, now: datetime) -> StatusReport:
    """Return the report on the outbox in *directory*."""
    live = answer.readiness
    stored_name = None if answer.vm is None else answer.vm.name
    vm_name = (None if live is None else live.vm) or local.vm_name or stored_name
    shown = () if answer.document is None else answer.document.events
    events = sorted((event for event in shown if not is_over(event)), key=_urgency)
    return StatusReport(
        at=format_time(now),
        known_at=_known_at(answer),
        agent=AgentReport(
            running=live is not None,
            ready=None if live is None else live.is_ready,
            reasons=() if live is None else live.reasons,
            version=None if live is None else live.version,
        ),
        vm=VmReport(name=vm_name, vm_id=None if answer.vm is None else answer.vm.vm_id),
        imds=_imds(answer, local, now),
        state=_state(answer, local, directory),
        configuration=ConfigurationReport(
            file=local.file,
            looked_for=local.looked_for,
            agent_file=None if live is None else live.configuration,
            version=version("scheduled-events-bridge"),
        ),
        configuration_problem=local.problem,
        events=tuple(_event(event, answer, vm_name, now) for event in events),
        sinks=tuple(_sinks(answer, local, now)),
    )


def _known_at(answer: StatusAnswer) -> str | None:
    moments = [
        answer.newest_record_at,
        None if answer.last_good_at is None else parse_time(answer.last_good_at).timestamp(),
        *(error.at for error in answer.last_errors.values()),
    ]
    return max((_time(moment) for moment in moments if moment is not None), default=None)


def _imds(answer: StatusAnswer, local: LocalFacts, now: datetime) -> ImdsReport:
    live = answer.readiness
    if live is not None:
        return ImdsReport(
            endpoint=live.imds,
            last_good_poll_at=live.last_good_poll_at,
            last_good_poll_seconds_ago=live.last_good_poll_seconds_ago,
            last_good_poll_is_live=True,
        )
    good = answer.last_good_at
    return ImdsReport(
        endpoint=local.imds_endpoint,
        last_good_poll_at=good,
        last_good_poll_seconds_ago=None if good is None else _seconds(now - parse_time(good)),
        last_good_poll_is_live=False,
    )


def _state(answer: StatusAnswer, local: LocalFacts, directory: Path) -> StateReport:
    live = answer.readiness
    return StateReport(
        directory=directory_text(directory),
        stream_id=answer.stream_id,
        behind=None
        if live is None or live.outbox_behind is None
        else BehindReport(reason=live.outbox_behind, seconds=live.outbox_behind_seconds),
        approvals_disabled=(directory / DISABLED_FILE).is_symlink() or (directory / DISABLED_FILE).exists(),
        approvals_unsafe=local.approvals_unsafe,
        unusable_keys=local.unusable_keys,
        outbox_bytes=answer.used_bytes,
        max_bytes=local.max_bytes,
        kept_files=tuple(_kept_file(directory, name) for name in answer.older_files),
    )


def _kept_file(directory: Path, name: str) -> FileReport:
    from bridge.outbox.database import file_bytes  # noqa: PLC0415  # imports sqlite3

    return FileReport(name=name, bytes=file_bytes(directory / name))


def _urgency(event: ScheduledEvent) -> tuple[bool, float]:
    """Return the sort key of events: started events first, then by NotBefore."""
    is_ahead = event.event_status == "Scheduled"
    return is_ahead, float("inf") if event.not_before is None else event.not_before.timestamp()


def _event(event: ScheduledEvent, answer: StatusAnswer, vm_name: str | None, now: datetime) -> EventReport:
    key = event.event_id and (event.event_id, digest(event))
    approvals = [each for each in answer.approvals if each.key == key and each.state is not ApprovalStage.OVER]
    decisions = [each for each in answer.decisions if each.key == key or _holds(each, event)]
    return EventReport(
        **{name: getattr(event, name) for name in ScheduledEvent.__struct_fields__},
        seconds_to_not_before=None if event.not_before is None else _seconds(event.not_before - now),
        affects_this_vm=names_vm(event, vm_name),
        last_transition=_last_transition(answer.last_transitions.get(event.key), now),
        approval=_approval(approvals[-1]) if approvals else None,
        decisions=tuple(map(_decision, decisions)),
    )


def _holds(decision: StoredDecision, event: ScheduledEvent) -> bool:
    return decision.state is DecisionStage.ON_HOLD and decision.event_id == event.event_id


def _last_transition(record: TransitionRecord | None, now: datetime) -> TransitionReport | None:
    if record is None:
        return None
    return TransitionReport(
        transition=record.transition,
        evidence=record.evidence,
        observed_at=record.observed_at,
        seconds_ago=max(_seconds(now - parse_time(record.observed_at)), 0.0),
    )


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


def _sinks(answer: StatusAnswer, local: LocalFacts, now: datetime) -> Iterator[SinkReport]:
    """Yield the configured sinks in their order, then the other sinks of the outbox."""
    totals = answer.totals
    live = {} if answer.readiness is None else answer.readiness.sinks
    for name in dict.fromkeys([*(local.sinks or ()), *totals.sinks]):
        row, error = totals.sinks.get(name) or SinkRow(name=name), answer.last_errors.get(name)
        oldest_at = totals.oldest_pending_at.get(name)
        yield SinkReport(
            name=name,
            configured=None if local.sinks is None else name in local.sinks,
            accepted=row.accepted,
            delivered=row.delivered,
            pending=row.pending,
            parked=row.parked,
            expired=row.expired,
            evicted=row.evicted,
            discarded=row.discarded,
            oldest_pending_seconds=0.0 if oldest_at is None else round(max(now.timestamp() - oldest_at, 0.0), 3),
            last_error=None if error is None else error.message,
            last_error_at=None if error is None else _time(error.at),
            needs_attention=live[name].needs_attention if name in live else None,
        )


def _time(timestamp_seconds: float) -> str:
    return format_time(datetime.fromtimestamp(timestamp_seconds, timezone.utc))


def _seconds(span: timedelta) -> float:
    return round(span.total_seconds(), 3)
