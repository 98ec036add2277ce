"""What the simulated world reports: its changes, the approvals it received, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from bridge.testing.events import Event
from bridge.testing.table import SimulatorError


class UnknownEvent(SimulatorError):
    """No event in the document has that EventId."""


class WrongState(SimulatorError):
    """The event exists, but its status does not allow what was asked."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that happened in the world."""

    at_seconds: float
    what: str
    """scheduled, started, updated, completed, canceled, approved, or a sentence on anything else."""
    incarnation: int
    event: Event | None = None


@dataclass(frozen=True, kw_only=True)
class ApprovalReceived:
    """One EventId of one StartRequests body."""

    at: datetime
    vm: str
    event_id: str
    result: str
    """approved, already_approved, already_started, or unknown_event (the whole body was then refused)."""
