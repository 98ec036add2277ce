"""Implements the `demo` command, which runs the agent and a simulated IMDS in one process.

The demo does not read a configuration. It ends after about 20 seconds, and deletes its temporary state directory.

On a terminal, `bridge.cli.demo_view` explains each record. If standard output is not a terminal, or if the Python
package rich is not installed, the demo prints the records as JSON lines.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bridge import logs
from bridge.agent.agent import Agent
from bridge.cli.portal import library
from bridge.cli.signals import set_by_signals
from bridge.cli.terminal import is_terminal, say
from bridge.config.loader import read
from bridge.errors import BridgeError, DeliveryFailed
from bridge.outbox import deliveries
from bridge.system import ephemeral_disk
from bridge.testing import Change, Scenario, Simulator, load_scenario

if TYPE_CHECKING:
    from bridge.cli.demo_view import Screen

_SCENARIO = "live-migration"
_TICK_SECONDS = 0.1
#: The agent confirms the end of an event with five responses.
_PATIENCE_SECONDS = 10.0
#: On Windows, a file cannot be deleted while a virus scanner keeps it open.
_temporary_directory = partial(
    tempfile.TemporaryDirectory, prefix="scheduled-events-bridge-demo-", ignore_cleanup_errors=True
)


def demo(*, with_portal: bool) -> None:
    """Run the demo.

    Raises KeyboardInterrupt on a signal, BrokenPipeError if standard output is a closed pipe, and BridgeError if the
    agent did not deliver every record.
    """
    if with_portal:
        library()  # reports a missing library
        from bridge.cli.demo_portal import run_portal_demo  # noqa: PLC0415  # the libraries of the portal

        with _temporary_directory() as directory:
            run_portal_demo(Path(directory))
        return
    stop = set_by_signals()
    # The demo keeps nothing, so it needs no warning that its directory is temporary.
    logging.getLogger(ephemeral_disk.__name__).setLevel(logging.ERROR)
    scenario = load_scenario(_SCENARIO)
    with _temporary_directory() as directory:
        _play(scenario, _view(scenario), Path(directory), stop)
    if stop.is_set():
        raise KeyboardInterrupt


def _view(scenario: Scenario) -> JsonLines | Screen:
    if is_terminal():
        try:
            from bridge.cli.demo_view import Screen  # noqa: PLC0415  # rich is for a terminal only
        except ModuleNotFoundError:
            say("The output is JSON, because the Python package rich is not installed.")
        else:
            return Screen(scenario)
    return JsonLines()


class JsonLines:
    """Prints JSON lines to standard output, and warnings to standard error."""

    def __init__(self) -> None:
        logs.configure(level=logging.WARNING)
        self.sinks = read({}).sinks
        self._probes = [sink.build() for sink in self.sinks]

    def begin(self) -> None:
        """Print nothing."""

    def refresh(self) -> None:
        """Raise BrokenPipeError if the reader of standard output has ended."""
        for probe in self._probes:
            try:
                probe.check()
            except DeliveryFailed as failed:
                if sys.stdout is None:
                    raise
                raise BrokenPipeError from failed

    def end(self, *, is_whole: bool) -> None:
        """Print nothing."""


def _play(scenario: Scenario, view: JsonLines | Screen, directory: Path, stop: threading.Event) -> None:
    changes: list[Change] = []
    is_whole = False
    with closing(Simulator(scenario, speed=scenario.demo_speed)) as simulator:
        simulator.world.listen(changes.append)
        settings = read({"imds": {"endpoint": simulator.endpoint}, "status": {"listen": ""}, "stop_grace_seconds": 1.0})
        agent = Agent(msgspec.structs.replace(settings, sinks=view.sinks), directory)
        try:
            view.begin()
            simulator.start()
            agent.start()
            is_whole = _watch(simulator, agent, view, changes, stop=stop)
        finally:
            agent.stop()
            view.end(is_whole=is_whole)
    if not is_whole and not stop.is_set():
        raise BridgeError(
            f"The simulated Azure made {len(changes)} changes, and the agent did not deliver all of them. The machine "
            "might be very busy, or standard output might be full. Run the demo again."
        )


def _watch(
    simulator: Simulator,
    agent: Agent,
    view: JsonLines | Screen,
    changes: list[Change],
    *,
    stop: threading.Event,
) -> bool:
    give_up_at: float | None = None
    while not stop.wait(_TICK_SECONDS):
        agent.run_due()
        view.refresh()
        if not simulator.world.is_finished:
            continue
        totals = agent.outbox.read(deliveries.totals).sinks.values()
        if min((row.delivered for row in totals), default=0) >= len(changes):
            view.refresh()
            return True
        give_up_at = give_up_at or time.monotonic() + _PATIENCE_SECONDS
        if time.monotonic() >= give_up_at:
            break
    return False
