"""Runs the simulator for the `simulate` command, and prints each event that changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bridge.testing.simulator.control import CONTROL_PATH
from bridge.testing.simulator.server import Simulator
from bridge.testing.simulator.world import Change

_LOOK_SECONDS = 0.1


def serve(*, stop: threading.Event, say: Callable[[str], None], **options: Any) -> None:
    """Run a `Simulator` with *options* until *stop* is set.

    Call *say* with one line for each endpoint at the start, and with one line for each change afterward. Raise
    ScenarioError, WrongRequest, or SimulatorError on failure.
    """
    simulator = Simulator(**options)
    simulator.world.listen(lambda change: say(describe_change(change)))
    with simulator:
        for name, endpoint in simulator.endpoints.items():
            say(f"{name}: {endpoint}/metadata/scheduledevents?api-version=2020-07-01")
        say(f"control: {simulator.endpoint}{CONTROL_PATH}")
        while not stop.wait(_LOOK_SECONDS):
            simulator.world.advance()


def describe_change(change: Change) -> str:
    """Return *change* as one line of text."""
    moment = f"[{change.at_seconds:7.0f} s]"
    event = change.event
    if event is None:
        return f"{moment} {change.what}"
    notice = ""
    if change.what in ("scheduled", "updated") and event.status == "Scheduled":
        notice = f", NotBefore in {event.not_before_seconds - change.at_seconds:.0f} s"
    resources = ", ".join(event.resources) or "no VM"
    return (
        f"{moment} {change.what} {event.spec.event_type} {event.event_id} for {resources}{notice} "
        f"(incarnation {change.incarnation})"
    )
