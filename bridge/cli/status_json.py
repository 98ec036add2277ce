"""Builds the report that `status` displays, and that `status --json` prints as JSON.

The keys are stable. If no agent is running, values that only an agent can report are null.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from bridge.agent.control_requests import Status
from bridge.approval.digest import digest
from bridge.clock import format_time, parse_time
from bridge.events.event import ScheduledEvent, VmIdentity, names_vm
from bridge.events.record import TransitionRecord
from bridge.events.transitions import is_over
from bridge.health.readiness import Readiness, SinkReadiness, directory_text
from bridge.outbox.approvals import DISABLED_FILE
from bridge.outbox.rows import ApprovalStage, DecisionStage, PendingApproval, SinkRow, StoredDecision

SCHEMA_VERSION = 1


class ConfigurationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration that the command found. A running agent might use a different one."""

    file: str | None = None
    """Null if no file was found, or if only the state directory was given."""
    looked_for: str | None = None
    problem: str | None = None
    sinks: tuple[str, ...] | None = None
    vm_name: str | None = None
    imds_endpoint: str | None = None
    max_bytes: int | None = None
    approvals_unsafe: tuple[str, ...] = ()
    """Files that other users can change. The agent approves nothing because of these files."""
    unusable_keys: tuple[str, ...] = ()
    """Trusted keys that the agent cannot use. The agent ignores decisions that are signed with these keys."""


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state directory."""

    directory: str
    stream_id: str
    approvals_disabled: bool
    outbox_bytes: int
    kept_files: tuple[str, ...]
    """Older outbox files, which are called generations."""


class EventReport(ScheduledEvent, frozen=True, kw_only=True):
    """An active event."""

    seconds_to_not_before: float | None
    affects_this_vm: bool | None
    last_transition: TransitionRecord | None
    """The newest record that reports a change in the document."""
    approval: PendingApproval | None
    decisions: tuple[StoredDecision, ...]
    """The open decisions on the current version of the event, and all holds on the event."""


class SinkReport(SinkReadiness, frozen=True, kw_only=True):
    """The state of one sink, and its last error."""

    name: str
    configured: bool | None
    """Null if the configuration is unknown."""
    last_error: str | None
    last_error_at: str | None


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The complete report."""

    schema_version: int = SCHEMA_VERSION
    at: str
    known_at: str | None
    """The time of the last change in the outbox."""
    agent: Readiness | None
    """The readiness of the running agent, with the keys of /readyz."""
    vm: VmIdentity
    last_good_poll_at: str | None
    """The time of the last successful poll. If no agent is running, this is the last saved time, which can be old."""
    state: StateReport
    configuration: ConfigurationReport
    active_event_ids: tuple[str, ...] | None
    """The EventIds of the open events. Null if no agent is running, or if the open events are unknown."""
    events: tuple[EventReport, ...]
    last_ending: TransitionRecord | None
    """The newest record of an ending with a measured impact."""
    sinks: tuple[SinkReport, ...]


def build_report(answer: Status, *, directory: Path, configuration: ConfigurationReport, now: datetime) -> StatusReport:
    """Return the report for the state directory *directory*."""
    agent = answer.readiness
    vm = answer.vm or VmIdentity()
    vm_name = (None if agent is None else agent.vm) or configuration.vm_name or vm.name
    shown = () if answer.document is None else answer.document.events
    events = sorted((event for event in shown if not is_over(event)), key=_urgency)
    return StatusReport(
        at=format_time(now),
        known_at=_known_at(answer),
        agent=agent,
        vm=msgspec.structs.replace(vm, name=vm_name),
        last_good_poll_at=answer.last_good_at if agent is None else agent.last_good_poll_at,
        state=StateReport(
            directory=directory_text(directory),
            stream_id=answer.totals.stream_id or "",
            approvals_disabled=(directory / DISABLED_FILE).is_symlink() or (directory / DISABLED_FILE).exists(),
            outbox_bytes=answer.used_bytes,
            kept_files=answer.older_files,
        ),
        configuration=configuration,
        active_event_ids=answer.active_event_ids,
        events=tuple(_event(event, answer, vm_name, now) for event in events),
        last_ending=answer.last_ending,
        sinks=tuple(_sinks(answer, configuration, now)),
    )


def _known_at(answer: Status) -> str | None:
    moments = [
        answer.newest_record_at,
        None if answer.last_good_at is None else parse_time(answer.last_good_at).timestamp(),
        *(at for _, at in answer.last_errors.values()),
    ]
    return max((_time(moment) for moment in moments if moment is not None), default=None)


def _urgency(event: ScheduledEvent) -> tuple[bool, float]:
    is_ahead = event.event_status == "Scheduled"
    return is_ahead, float("inf") if event.not_before is None else event.not_before.timestamp()


def _event(event: ScheduledEvent, answer: Status, vm_name: str | None, now: datetime) -> EventReport:
    key = event.event_id and (event.event_id, digest(event))
    approvals = [each for each in answer.approvals if each.key == key and each.state is not ApprovalStage.OVER]
    decisions = [each for each in answer.decisions if each.key == key or _holds(each, event)]
    seconds = None if event.not_before is None else round((event.not_before - now).total_seconds(), 3)
    return EventReport(
        **{name: getattr(event, name) for name in ScheduledEvent.__struct_fields__},
        seconds_to_not_before=seconds,
        affects_this_vm=names_vm(event, vm_name),
        last_transition=answer.last_transitions.get(event.key),
        approval=approvals[-1] if approvals else None,
        decisions=tuple(decisions),
    )


def _holds(decision: StoredDecision, event: ScheduledEvent) -> bool:
    return decision.state is DecisionStage.ON_HOLD and decision.event_id == event.event_id


def _sinks(answer: Status, configuration: ConfigurationReport, now: datetime) -> Iterator[SinkReport]:
    totals, configured = answer.totals, configuration.sinks if answer.sinks is None else answer.sinks
    live = {} if answer.readiness is None else answer.readiness.sinks
    for name in dict.fromkeys([*(configured or ()), *totals.sinks]):
        row = totals.sinks.get(name) or SinkRow(name=name)
        last_error, last_error_at = answer.last_errors.get(name, (None, None))
        yield SinkReport(
            name=name,
            configured=None if configured is None else name in configured,
            **row.counts,
            oldest_pending_seconds=round(totals.oldest_pending_seconds(name, now.timestamp()), 3),
            last_error=last_error,
            last_error_at=None if last_error_at is None else _time(last_error_at),
            needs_attention=live[name].needs_attention if name in live else None,
        )


def _time(timestamp_seconds: float) -> str:
    return format_time(datetime.fromtimestamp(timestamp_seconds, timezone.utc))
