"""The exceptions of the simulator."""

from __future__ import annotations

from bridge.errors import BridgeError


class SimulatorError(BridgeError):
    """The simulator cannot perform the requested action."""


class WrongRequest(SimulatorError):
    """A request to the simulator is invalid.

    The message contains one line for each error in the request.
    """


class UnknownEvent(SimulatorError):
    """The document contains no event with the requested EventId."""


class WrongState(SimulatorError):
    """The status of the event does not allow the requested action."""
