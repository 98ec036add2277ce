"""What `status` reports: the JSON that `status --json` prints, with stable keys and units in their names.

A fact that only a running agent knows is null when none answers; nothing is guessed.
"""

from __future__ import annotations

import msgspec

from bridge.health.report import STUCK_SECONDS

SCHEMA_VERSION = 1


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an agent runs here, and how it is."""

    running: bool | None
    """Null: it cannot be seen."""
    ready: bool | None
    reasons: tuple[str, ...]
    """Why it is not ready."""
    version: str | None
    asked: str | None
    """The URL; null when nobody was asked."""
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
    approvals_disabled: bool
    outbox_bytes: int
    max_bytes: int | None
    set_aside: tuple[AsideReport, ...]


class TransitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of an event that Azure made."""

    transition: str
    evidence: str
    observed_at: str
    seconds_ago: float


class ApprovalReport(msgspec.Struct, frozen=True, kw_only=True):
    """An approval of the event as it is now."""

    state: str
    """draining, wanted, posted, dry_run, command_failed or withdrawn."""
    source: str
    approvers: tuple[str, ...]
    attempts: int
    http_status: int | None
    changed_at: str


class DecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A decision on the event as it is now that is not finished with, or holds it."""

    state: str
    """new, waiting (for further approvers, or for Azure) or held."""
    source: str
    approver: str
    verdict: str
    reason: str | None
    expires_at: str


class EventReport(msgspec.Struct, frozen=True, kw_only=True):
    """An active event."""

    event_id: str | None
    event_type: str | None
    event_status: str
    event_source: str | None
    not_before: str | None
    seconds_to_not_before: float | None
    """Negative once it has passed."""
    duration_seconds: int | None
    resources: tuple[str, ...] | None
    affects_this_vm: bool | None
    last_transition: TransitionReport | None
    approval: ApprovalReport | None
    decisions: tuple[DecisionReport, ...]


class SinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """One sink: its records by state, and why it has not got those it is owed."""

    name: str
    configured: bool | None
    """Null: the configuration is not known."""
    accepted: int
    delivered: int
    pending: int
    parked: int
    evicted: int
    discarded: int
    expired: int
    oldest_pending_seconds: float
    last_error: str | None
    last_error_at: str | None
    needs_attention: bool | None
    """Null: only a running agent knows."""

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
    configuration_problem: str | None
    events: tuple[EventReport, ...]
    sinks: tuple[SinkReport, ...]
