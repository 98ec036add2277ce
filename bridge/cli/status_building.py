"""How a status report is put together: from an outbox, what its agent says of itself, and the configuration.

Pure but for the files beside the outbox: who asks, and when it is, is the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from bridge.approval.digest import digest
from bridge.approval.disabled import DISABLED_FILE, is_disabled
from bridge.cli.status_report import (
    AgentReport,
    ApprovalReport,
    AsideReport,
    DecisionReport,
    EventReport,
    ImdsReport,
    SinkReport,
    StateReport,
    StatusReport,
    TransitionReport,
    VmReport,
)
from bridge.clock import format_time, parse_time
from bridge.config.loader import Settings
from bridge.events.event import ScheduledEvent, format_not_before, names_vm
from bridge.events.record import TransitionRecord
from bridge.health.probe import AgentAnswer
from bridge.health.report import Readiness, SinkReadiness
from bridge.outbox.approvals import PendingApproval, StoredDecision
from bridge.outbox.database import DATABASE
from bridge.outbox.deliveries import SinkAccount
from bridge.outbox.reader import LastError, Snapshot

_OPEN_CONSENTS = frozenset({"draining", "wanted", "posted", "dry_run", "command_failed", "withdrawn"})
_OPEN_DECISIONS = frozenset({"new", "waiting", "held"})


def build_report(
    glance: Snapshot,
    *,
    directory: Path,
    held: bool | None,
    marked: bool,
    asked: AgentAnswer,
    settings: Settings | None,
    configuration_problem: str | None,
    now: datetime,
) -> StatusReport:
    """Return the report. *held*: somebody holds the directory; *marked*: an agent says that it works from memory."""
    live = asked.readiness
    vm_name = _vm_name(glance, live, settings)
    events = () if glance.stored.document is None else glance.stored.document.events
    return StatusReport(
        at=format_time(now),
        known_at=_known_at(glance),
        agent=AgentReport(
            running=True if live is not None else held,
            ready=None if live is None else live.is_ready,
            reasons=() if live is None else live.reasons,
            version=None if live is None else live.version,
            asked=asked.url,
            problem=None if held is False and asked.is_silent else asked.problem,
        ),
        vm=VmReport(name=vm_name, vm_id=glance.stored.vm.vm_id if glance.stored.vm is not None else None),
        imds=_imds(glance, live, settings, now),
        state=_state(glance, live, settings, directory=directory, marked=marked),
        configuration_problem=configuration_problem,
        events=tuple(_event(event, glance, vm_name, now) for event in sorted(events, key=_urgency)),
        sinks=tuple(_sinks(glance, live, settings, now)),
    )


def _vm_name(glance: Snapshot, live: Readiness | None, settings: Settings | None) -> str | None:
    stored = glance.stored.vm.name if glance.stored.vm is not None else None
    return (live.vm if live is not None else None) or (settings.vm.name if settings is not None else None) or stored


def _known_at(glance: Snapshot) -> str | None:
    good = glance.stored.last_good_at
    moments = [
        glance.newest_record_at,
        None if good is None else good.timestamp(),
        *(error.at for error in glance.last_errors.values()),
    ]
    return _time_of(max((moment for moment in moments if moment is not None), default=None))


def _imds(glance: Snapshot, live: Readiness | None, settings: Settings | None, now: datetime) -> ImdsReport:
    if live is not None:
        return ImdsReport(
            endpoint=live.imds,
            last_good_poll_at=live.last_good_poll_at,
            last_good_poll_seconds_ago=live.last_good_poll_seconds_ago,
            last_good_poll_is_live=True,
        )
    good = glance.stored.last_good_at
    return ImdsReport(
        endpoint=None if settings is None else settings.imds.endpoint,
        last_good_poll_at=None if good is None else format_time(good),
        last_good_poll_seconds_ago=None if good is None else _seconds(now - good),
        last_good_poll_is_live=False,
    )


def _state(
    glance: Snapshot, live: Readiness | None, settings: Settings | None, *, directory: Path, marked: bool
) -> StateReport:
    aside = sorted(
        path
        for path in directory.glob(f"{DATABASE}.*-*")
        if not path.name.endswith(("-wal", "-shm")) and not path.name.startswith((f"{DATABASE}-wal", f"{DATABASE}-shm"))
    )
    return StateReport(
        directory=os.fsencode(directory.absolute()).decode("utf-8", "replace"),
        stream_id=glance.stored.stream_id,
        in_memory=marked or (live is not None and live.state_in_memory),
        approvals_disabled=is_disabled(directory / DISABLED_FILE),
        outbox_bytes=sum(_bytes(directory / f"{DATABASE}{suffix}") for suffix in ("", "-wal")),
        max_bytes=None if settings is None else settings.state.max_bytes,
        set_aside=tuple(AsideReport(name=path.name, bytes=_bytes(path)) for path in aside),
    )


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _urgency(event: ScheduledEvent) -> tuple[bool, float]:
    """Return what sorts events: what has begun, then the soonest."""
    is_ahead = event.event_status == "Scheduled"
    return is_ahead, float("inf") if event.not_before is None else event.not_before.timestamp()


def _event(event: ScheduledEvent, glance: Snapshot, vm_name: str | None, now: datetime) -> EventReport:
    key = event.event_id and (event.event_id, digest(event))
    consents = [each for each in glance.consents if each.key == key and each.state in _OPEN_CONSENTS]
    decisions = [each for each in glance.decisions if each.key == key and each.state in _OPEN_DECISIONS]
    return EventReport(
        event_id=event.event_id,
        event_type=event.event_type,
        event_status=event.event_status,
        event_source=event.event_source,
        not_before=format_not_before(event.not_before),
        seconds_to_not_before=None if event.not_before is None else _seconds(event.not_before - now),
        duration_seconds=event.duration_seconds,
        resources=event.resources,
        affects_this_vm=names_vm(event, vm_name),
        last_transition=_last_transition(glance.last_records.get(event.key, ()), now),
        approval=_approval(consents[-1]) if consents else None,
        decisions=tuple(map(_decision, decisions)),
    )


def _last_transition(records: Sequence[TransitionRecord], now: datetime) -> TransitionReport | None:
    for record in records:
        if record.approval is None:
            return TransitionReport(
                transition=record.transition.value,
                evidence=record.evidence.value,
                observed_at=record.observed_at,
                seconds_ago=_seconds(now - parse_time(record.observed_at)),
            )
    return None


def _approval(consent: PendingApproval) -> ApprovalReport:
    return ApprovalReport(
        state=consent.state,
        source=consent.source,
        approvers=consent.approvers,
        attempts=consent.attempts,
        http_status=consent.http_status,
        changed_at=_time_of(consent.changed_at) or "",
    )


def _decision(decision: StoredDecision) -> DecisionReport:
    return DecisionReport(
        state=decision.state,
        source=decision.source,
        approver=decision.approver,
        verdict=decision.verdict,
        reason=decision.reason,
        expires_at=_time_of(decision.expires_at) or "",
    )


def _sinks(glance: Snapshot, live: Readiness | None, settings: Settings | None, now: datetime) -> list[SinkReport]:
    """Return the configured sinks in their order, then the others that the outbox knows."""
    configured = [] if settings is None else [sink.name for sink in settings.sinks]
    said: Mapping[str, SinkReadiness] = {} if live is None else live.sinks
    names = dict.fromkeys([*configured, *glance.sinks, *said])
    return [
        _sink(
            name,
            glance.sinks.get(name, SinkAccount()),
            said.get(name),
            glance.last_errors.get(name),
            configured=None if settings is None else name in configured,
            now=now,
        )
        for name in names
    ]


def _sink(
    name: str,
    account: SinkAccount,
    live: SinkReadiness | None,
    error: LastError | None,
    *,
    configured: bool | None,
    now: datetime,
) -> SinkReport:
    oldest = account.oldest_pending_at
    waited = 0.0 if oldest is None else max(now.timestamp() - oldest, 0.0)

    def count(state: str) -> int:
        return int(getattr(account if live is None else live, state))

    return SinkReport(
        name=name,
        configured=configured,
        accepted=count("accepted"),
        delivered=count("delivered"),
        pending=count("pending"),
        parked=count("parked"),
        evicted=count("evicted"),
        discarded=count("discarded"),
        expired=count("expired"),
        oldest_pending_seconds=round(waited if live is None else live.oldest_pending_seconds, 3),
        last_error=None if error is None else error.message,
        last_error_at=None if error is None else _time_of(error.at),
        needs_attention=None if live is None else live.needs_attention,
    )


def _time_of(timestamp_seconds: float | None) -> str | None:
    if timestamp_seconds is None:
        return None
    return format_time(datetime.fromtimestamp(timestamp_seconds, timezone.utc))


def _seconds(span: timedelta) -> float:
    return round(span.total_seconds(), 3)
