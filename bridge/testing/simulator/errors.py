"""The simulator's exceptions: what cannot be done, makes no sense, is not there, or is not in the right status."""

from __future__ import annotations

from bridge.errors import BridgeError


class SimulatorError(BridgeError):
    """The simulator cannot do what was asked of it."""


class WrongRequest(SimulatorError):
    """What was asked of the simulator does not make sense; the message lists every mistake, one a line."""


class UnknownEvent(SimulatorError):
    """No event in the document has that EventId."""


class WrongState(SimulatorError):
    """The event exists, but its status does not allow what was asked."""
