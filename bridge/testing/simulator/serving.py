"""Runs a simulator in the foreground and tells what happens in it: the body of the `simulate` command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bridge.testing.simulator.control import CONTROL_PATH
from bridge.testing.simulator.server import DEFAULT_VM, Simulator
from bridge.testing.simulator.world import Change

_LOOK_SECONDS = 0.1
#: An agent polls once a second.
_SEEN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the `simulate` command may be told."""

    scenario: str = "live-migration"
    listen: str = "127.0.0.1:8169"
    vms: tuple[str, ...] = (DEFAULT_VM,)
    speed: float | None = None
    """Scenario seconds a real second. None: 1, as in Azure."""
    rate_limit: bool = True
    first_call_seconds: float = 0.0
    allow_remote: bool = False
    until_finished: bool = False
    """End by itself when the scenario is over and every VM that asks has seen the empty document."""
    new_id_each_status: bool = False
    """Draw a new EventId when an event starts, as Microsoft's mock server does; Azure keeps one."""


def serve(options: ServeOptions, *, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Run a simulator until *stop* is set, POST /control/stop, or (on request) the scenario is over.

    *say* gets one line for each endpoint and each change. Raises ScenarioError, WrongRequest or SimulatorError.
    """
    simulator = Simulator(
        options.scenario,
        listen=options.listen,
        vms=options.vms,
        speed=1.0 if options.speed is None else options.speed,
        rate_limit=options.rate_limit,
        first_call_seconds=options.first_call_seconds,
        allow_remote=options.allow_remote,
        new_id_each_status=options.new_id_each_status,
    )
    simulator.world.listen(lambda change: say(describe_change(change)))
    with simulator:
        for name, endpoint in simulator.endpoints.items():
            say(f"{name}: {endpoint}/metadata/scheduledevents?api-version=2020-07-01")
        say(f"control: {simulator.endpoint}{CONTROL_PATH}")
        while not stop.wait(_LOOK_SECONDS) and not simulator.stop_requested.is_set():
            simulator.world.advance()
            if options.until_finished and simulator.world.is_finished:
                _let_everybody_see(simulator, stop)
                return


def _let_everybody_see(simulator: Simulator, stop: threading.Event) -> None:
    """Wait until each VM that has asked at all asks once more: the end of the last event is a record too."""
    finished_at = simulator.world.clock.monotonic()
    curious = {seen.vm for seen in simulator.requests}
    give_up_at = time.monotonic() + _SEEN_SECONDS
    while curious and time.monotonic() < give_up_at and not stop.wait(_LOOK_SECONDS):
        seen_again = {seen.vm for seen in simulator.requests if seen.monotonic_seconds > finished_at}
        if curious <= seen_again:
            stop.wait(_LOOK_SECONDS)  # the last answer is still on its way
            return


def describe_change(change: Change) -> str:
    """Return *change* as a line for a person."""
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
