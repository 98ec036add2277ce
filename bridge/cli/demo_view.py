"""The demo on a terminal: a live table of the records as they arrive, each with its meaning, above a countdown.

Written for a reader who has never heard of Scheduled Events. What is shown of an event comes from the agent's records;
the simulator is asked only when a change was made, to show how long the agent took. What the words say of Azure is from
Microsoft's page "Scheduled Events for Linux VMs"; how long a freeze stays Started is from published incident notes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import ClassVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bridge import logs
from bridge.cli.terminal import this_command
from bridge.clock import utc_now
from bridge.config.loader import SinkSettings
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import Sink, SinkConfig
from bridge.testing import Change, Scenario, Simulator
from bridge.text import duration

_MOST_COLUMNS = 78
_WIDE_COLUMNS = 60
_SINK_NAME = "screen"
_STYLES = {
    Transition.SCHEDULED: "bold bright_magenta",
    Transition.STARTED: "bold bright_red",
    Transition.COMPLETED: "bold green",
}
_ON_CALL = {
    Transition.SCHEDULED: "On call: drain what cannot bear a pause.",
    Transition.STARTED: "On call: this explains the VM's alerts.",
    Transition.COMPLETED: "On call: put the VM back to work.",
}
_NEXT = (
    ("demo | head -n 1", "one record, as a program gets it"),
    ("simulate --list", "more scenarios to try an agent on"),
    ("run --config FILE", "the agent, on a VM; see README.md"),
)

Arrival = tuple[TransitionRecord, datetime]
"""A record, and when the sink got it."""


class Screen:
    """The live table and what is printed around it."""

    def __init__(self, scenario: Scenario) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._width = min(self._console.width, _MOST_COLUMNS)
        self._whole_seconds = scenario.length_seconds / scenario.demo_speed
        self._queue: SimpleQueue[Arrival] = SimpleQueue()
        self._arrivals: list[Arrival] = []
        self._changed_at: dict[tuple[str, str], datetime] = {}
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")
        self.sinks = (_sink_into(self._queue),)

    def begin(self, simulator: Simulator) -> None:
        """Print what is going to be seen, and start the table."""
        self._simulator = simulator
        simulator.world.listen(self._note_change)
        self._print("Simulated: Azure, and one VM that it live-migrates. Real: the agent watching.")
        self._print(f"Time runs {simulator.world.speed:.0f} times faster: 15 minutes of notice pass in 10 seconds.\n")
        self._live.start()
        # `Live` has put a stream in place of standard error that prints above the table.
        logs.configure(level=logging.WARNING, form="text", stream=sys.stderr)

    def refresh(self) -> None:
        """Add the records that arrived, and draw the table again."""
        while True:
            try:
                self._arrivals.append(self._queue.get_nowait())
            except Empty:
                break
        self._live.update(Group(self._table(), Text(f"\n{self._bar()}\n{self._countdown()}")), refresh=True)

    def end(self, *, is_whole: bool) -> None:
        """Leave the table on the screen, without the countdown, and print what to try next."""
        self._live.update(self._table())
        self._live.stop()
        if not is_whole:
            self._print("Stopped before the end. Nothing is left behind.")
            return
        slowest = max(delay for delay in map(self._delay_seconds, self._arrivals) if delay is not None)
        self._print(f"\n{len(self._changed_at)} changes, {len(self._arrivals)} records, none lost.", style="bold")
        self._print(f"Slowest: {slowest:.2f} s, at one poll a second. Nothing is left behind. Next:")
        for arguments, what in _NEXT:
            # Never wrapped: a line that was broken in two cannot be copied from the screen.
            command = Text(f"  {this_command()} {arguments}", style="bold")
            self._console.print(command, no_wrap=True, overflow="ignore", crop=False)
            self._print(f"    {what}")

    def _print(self, text: str, *, style: str = "") -> None:
        self._console.print(text, style=style, width=self._width)

    def _note_change(self, change: Change) -> None:
        if change.event is not None:
            at = self._simulator.world.wall_clock(change.at_seconds)
            self._changed_at.setdefault((change.event.event_id, change.what), at)

    def _seconds(self, moment: datetime) -> float:
        """Return *moment* as seconds since the demo began."""
        return (moment - self._simulator.world.wall_clock(0.0)).total_seconds()

    def _delay_seconds(self, arrival: Arrival) -> float | None:
        """Return how long after Azure's change the sink had the record; None for a record of no change."""
        record, arrived_at = arrival
        event_id = "" if record.event is None else record.event.event_id or ""
        changed_at = self._changed_at.get((event_id, record.transition.value))
        return None if changed_at is None else (arrived_at - changed_at).total_seconds()

    def _table(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=self._width)
        table.add_column("AT", justify="right", no_wrap=True, min_width=6)
        is_wide = self._width >= _WIDE_COLUMNS
        if is_wide:
            table.add_column("SEEN IN", justify="right", no_wrap=True)
        table.add_column("RECORD", no_wrap=True, min_width=len("scheduled"))
        table.add_column("WHAT IT MEANS", ratio=1)
        for arrival in self._arrivals:
            record, arrived_at = arrival
            delay = self._delay_seconds(arrival)
            table.add_row(
                f"{self._seconds(arrived_at):.1f} s",
                *(["" if delay is None else f"{delay:.2f} s"] if is_wide else []),
                Text(record.transition.value, style=_STYLES.get(record.transition, "bold")),
                Text(f"{_meaning(record)}\n{_ON_CALL.get(record.transition, '')}".rstrip()),
            )
        return table

    def _bar(self) -> str:
        columns = self._width - 2
        done = min(int(self._seconds(utc_now()) / self._whole_seconds * columns), columns)
        return f"[{'=' * done}{'.' * (columns - done)}]"

    def _countdown(self) -> str:
        """Return what comes next, as far as the agent's records say."""
        record = self._arrivals[-1][0] if self._arrivals else None
        if record is None or record.event is None:
            return "No event in the document. The agent polls once a second."
        if record.transition is Transition.STARTED:
            return "The event is under way; the document no longer says when it ends."
        if record.transition is not Transition.SCHEDULED or record.event.not_before is None:
            return "The document is empty again."
        left = (record.event.not_before - utc_now()).total_seconds()
        if left <= 0:
            return "NotBefore is now."
        return f"NotBefore in {left:.1f} s (in Azure: {duration(left * self._simulator.world.speed)})"


def _meaning(record: TransitionRecord) -> str:
    """Return what happened, in one sentence."""
    kind = "event" if record.event is None else record.event.event_type or "event"
    if record.transition is Transition.SCHEDULED:
        impact = f" of {record.event.duration_seconds} s" if record.event and record.event.duration_seconds else ""
        notice = "" if record.notice_seconds is None else f", {record.notice_seconds:.0f} s of notice"
        return f"Azure announced a {kind}{impact}{notice}."
    if record.transition is Transition.STARTED:
        return f"The {kind} began: the VM may pause at any moment."
    if record.transition is Transition.COMPLETED:
        return "It had started and left the document: it is over."
    return f"The agent recorded {record.transition.value}."


def _sink_into(queue: SimpleQueue[Arrival]) -> SinkSettings:
    """Return a sink that puts each record into *queue*; the agent delivers to it as to any other."""

    class ScreenSink(Sink):
        Config: ClassVar[type[SinkConfig]] = SinkConfig

        def send(self, batch: Sequence[TransitionRecord]) -> None:
            for record in batch:
                queue.put((record, utc_now()))

    return SinkSettings(type_name=_SINK_NAME, sink_class=ScreenSink, config=SinkConfig(name=_SINK_NAME))
