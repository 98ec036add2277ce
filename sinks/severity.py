"""Defines the severity, icon, and color of each record.

All sinks use the table in this module.

The severity of a `scheduled`, `started`, or `updated` record depends on the type of the event. For example, a spot
eviction is critical. The severity of all other records depends only on the transition. The end of an event is always
informational.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from bridge.sink import Transition, TransitionRecord


class Severity(str, Enum):
    """The severity of a record."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Look(NamedTuple):
    """The severity, icon, and color of a record."""

    severity: Severity
    icon: str
    color: str
    """The color as #rrggbb."""
    card_color: str
    """The color of a text in an Adaptive Card."""


_INFO = Look(Severity.INFO, "\N{INFORMATION SOURCE}\N{VARIATION SELECTOR-16}", "#0078d4", "accent")
_WARNING = Look(Severity.WARNING, "\N{WARNING SIGN}\N{VARIATION SELECTOR-16}", "#ffb900", "warning")
_CRITICAL = Look(Severity.CRITICAL, "\N{POLICE CARS REVOLVING LIGHT}", "#d13438", "attention")
_OVER = Look(Severity.INFO, "\N{WHITE HEAVY CHECK MARK}", "#107c10", "good")
_UNCERTAIN = Look(Severity.INFO, "\N{WHITE QUESTION MARK ORNAMENT}", "#8a8886", "default")

#: The looks of active events by event type, and of all other records by transition.
_LOOKS: dict[str | None, Look] = {
    "Freeze": _INFO,
    "Reboot": _WARNING,
    "Redeploy": _WARNING,
    "SpotRebalanceRecommendation": _WARNING,
    "Preempt": _CRITICAL,
    "Terminate": _CRITICAL,
    Transition.COMPLETED: _OVER,
    Transition.CANCELED: _OVER,
    Transition.ENDED: _UNCERTAIN,
    Transition.APPROVED: _INFO,
    Transition.APPROVAL_REFUSED: _WARNING,
    Transition.APPROVAL_FAILED: _WARNING,
    Transition.HEARTBEAT: _INFO,
    Transition.TEST: _INFO,
}


def look_of(record: TransitionRecord) -> Look:
    """Return the severity, icon, and color of *record*."""
    return _LOOKS.get(record.transition) or active_look(None if record.event is None else record.event.event_type)


def active_look(event_type: str | None) -> Look:
    """Return the severity, icon, and color of an active event. An unknown type is a warning."""
    return _LOOKS.get(event_type, _WARNING)
