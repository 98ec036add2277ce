"""`demo`: a simulated Azure and the real agent in one process, which ends by itself and leaves nothing behind.

The agent is the one of `run`: it polls, writes its outbox and delivers. Only three things differ, so that nobody has to
set anything up and nothing stays: IMDS is the simulator, the state lives in a temporary directory, and the status
listener is off. No file and no variable that `run` would read is read.

Piped, the records go to standard output through the stdout sink, as JSON lines. On a terminal `bridge.cli.demo_view`
shows them with their meaning; rich is imported only then, and where it was left out (an installation from the archive
of a release has nothing that a service never needs) the lines come there too.
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bridge import logs
from bridge.agent.agent import Agent
from bridge.cli.signals import SignalEvents
from bridge.config.loader import Settings, SinkSettings, read
from bridge.errors import BridgeError, DeliveryFailed, StateDirectoryError
from bridge.outbox import deliveries
from bridge.testing import Change, Scenario, Simulator, load_scenario

if TYPE_CHECKING:
    from bridge.cli.demo_view import Screen

_SCENARIO = "live-migration"
_TICK_SECONDS = 0.1
#: Five responses confirm the ending of an event.
_PATIENCE_SECONDS = 10.0
_STOP_GRACE_SECONDS = 1.0
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def run_demo() -> None:
    """Show a live migration from announcement to completion, in about 20 seconds.

    Raises KeyboardInterrupt when a signal ended it early, BrokenPipeError when the reader of standard output has
    gone, and BridgeError when a change did not arrive.
    """
    stop = threading.Event()
    scenario = load_scenario(_SCENARIO)
    with set_by_signals(stop), temporary_directory() as directory:
        _play(scenario, _view(scenario), directory, stop)
    if stop.is_set():
        raise KeyboardInterrupt


def _view(scenario: Scenario) -> JsonLines | Screen:
    if not sys.stdout.isatty():
        return JsonLines()
    try:
        from bridge.cli.demo_view import Screen  # noqa: PLC0415  # rich is for a terminal only
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        sys.stderr.write("Shown without a table, because the Python package rich is not installed.\n")
        return JsonLines()
    return Screen(scenario)


class JsonLines:
    """JSON lines on standard output, and nothing else there; warnings go to standard error."""

    def __init__(self) -> None:
        logs.configure(level=logging.WARNING)
        self.sinks = tuple(_without_first_break(sink) for sink in read({}).sinks)
        self._probes = [sink.build() for sink in self.sinks]

    def begin(self, simulator: Simulator) -> None:
        """Do nothing: only records are printed."""

    def refresh(self) -> None:
        """Raise BrokenPipeError when the reader has gone: `demo | head -n 1` should end at once."""
        for probe in self._probes:
            try:
                probe.check()
            except DeliveryFailed as failed:
                raise BrokenPipeError from failed

    def end(self, *, is_whole: bool) -> None:
        """Do nothing: the exit code is the answer."""


def _without_first_break(sink: SinkSettings) -> SinkSettings:
    """Return *sink*, of standard output, for one that begins with this process: no cut line can be in it."""
    sink_class = type(sink.sink_class.__name__, (sink.sink_class,), {"breaks_first_line": False})
    return msgspec.structs.replace(sink, sink_class=sink_class)


def _play(scenario: Scenario, view: JsonLines | Screen, directory: Path, stop: threading.Event) -> None:
    """Run both sides until the scenario is over or *stop* is set, and close everything."""
    changes: list[Change] = []
    simulator = Simulator(scenario, speed=scenario.demo_speed)
    simulator.world.listen(changes.append)
    is_whole = False
    try:
        settings = _settings(simulator.endpoint, view.sinks)
        agent = Agent(settings, directory)
        try:
            view.begin(simulator)
            simulator.start()
            agent.start()
            is_whole = _watch(simulator, agent, view, changes, stop=stop)
        finally:
            agent.stop()
            view.end(is_whole=is_whole)
    finally:
        simulator.close()
    if not is_whole and not stop.is_set():
        raise BridgeError(
            f"The simulated Azure made {len(changes)} changes, and not all of them were delivered. "
            "Is the machine very busy, or is standard output full? Run the demo again."
        )


def _settings(endpoint: str, sinks: tuple[SinkSettings, ...]) -> Settings:
    defaults = read(
        {"imds": {"endpoint": endpoint}, "status": {"listen": ""}, "stop_grace_seconds": _STOP_GRACE_SECONDS}
    )
    return msgspec.structs.replace(defaults, sinks=sinks)


def _watch(
    simulator: Simulator,
    agent: Agent,
    view: JsonLines | Screen,
    changes: list[Change],
    *,
    stop: threading.Event,
) -> bool:
    """Return whether every change was delivered, at the latest some seconds after the last change."""
    give_up_at: float | None = None
    while not stop.wait(_TICK_SECONDS):
        agent.run_due()
        view.refresh()
        if not simulator.world.is_finished:
            continue
        if _delivered(agent) >= len(changes):
            view.refresh()
            return True
        give_up_at = give_up_at or time.monotonic() + _PATIENCE_SECONDS
        if time.monotonic() >= give_up_at:
            break
    return False


def _delivered(agent: Agent) -> int:
    return min((row.delivered for row in agent.outbox.read(deliveries.totals).sinks.values()), default=0)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield a directory that is gone at the end."""
    prefix = "scheduled-events-bridge-demo-"
    try:
        # On Windows a file that a virus scanner holds cannot be deleted; that is no reason to fail.
        directory = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as exc:
        raise StateDirectoryError(
            f"The demo cannot make a temporary directory: {exc.strerror or exc}. Set TMPDIR to one it may write to."
        ) from exc
    with directory as name:
        yield Path(name)


@contextmanager
def set_by_signals(stop: threading.Event) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal end the demo in order; what is ignored (nohup) stays so."""
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number in numbers if before[number] is not signal.SIG_IGN]
    signals = SignalEvents()
    for number in taken:
        signals.set_on(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
