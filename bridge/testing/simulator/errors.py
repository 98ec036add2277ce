"""The exceptions of the simulator."""

from __future__ import annotations

from bridge.errors import BridgeError


class SimulatorError(BridgeError):
    """The simulator cannot do the requested action."""


class WrongRequest(SimulatorError):
    """A request to the simulator is invalid. The message has one line for each mistake."""


class UnknownEvent(SimulatorError):
    """The document contains no event with this EventId."""


class WrongState(SimulatorError):
    """The status of the event does not allow the requested action."""
