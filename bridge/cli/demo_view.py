"""The demo on a terminal: a line of time that moves, and each record as it arrives, told in plain words.

Records are printed for good, above; only the panel below them is drawn again and again, so that nothing flickers and
the story stays on the screen when the demo is over. What is shown of an event comes from the agent's records alone;
the simulator is asked only when a change was made, to say how long the agent took to tell.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import ClassVar

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bridge import logs
from bridge.cli.demo_words import meaning, on_call
from bridge.cli.terminal import this_command
from bridge.clock import parse_time, utc_now
from bridge.config.loader import SinkSettings
from bridge.events.event import ScheduledEvent
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import Sink, SinkConfig
from bridge.testing import Change, Scenario, Simulator
from bridge.text import duration

_MOST_COLUMNS = 78
_WIDE_COLUMNS = 60
_TRANSITION_COLUMNS = len("scheduled")
_GAP_COLUMNS = 2
_SINK_NAME = "screen"
_STYLES = {
    Transition.SCHEDULED: "bold yellow",
    Transition.STARTED: "bold red",
    Transition.COMPLETED: "bold green",
}
_LIVE_TRANSITIONS = (Transition.SCHEDULED, Transition.STARTED)
_NEXT = (
    ("demo | head -n 1", "one record, as a program gets it"),
    ("simulate --list", "more scenarios to try an agent on"),
    ("run --config FILE", "the agent, on a VM; see README.md"),
)

Arrival = tuple[TransitionRecord, datetime]
"""A record, and when the sink was handed it."""


@dataclass(frozen=True, kw_only=True)
class _Glyphs:
    """What the line of time is drawn with; also without colour one must see what is what."""

    quiet: str
    announced: str
    started: str
    not_before: str
    now: str

    def of(self, transition: Transition) -> str:
        """Return the glyph of the time that follows *transition*."""
        return {Transition.SCHEDULED: self.announced, Transition.STARTED: self.started}.get(transition, self.quiet)

    def style(self, glyph: str) -> str:
        """Return the style of *glyph*."""
        return {self.quiet: "dim", self.announced: "yellow", self.started: "red"}.get(glyph, "bold")


_ASCII = _Glyphs(quiet=".", announced="=", started="#", not_before="|", now="o")
_UNICODE = _Glyphs(quiet="·", announced="━", started="█", not_before="┃", now="●")


class Screen:
    """What a person sees of the demo."""

    def __init__(self, scenario: Scenario) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        logs.configure(level=logging.WARNING, json=False, stream=_Above(self._console))
        self._whole_seconds = scenario.length_seconds / scenario.demo_speed
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._changed_at: dict[tuple[str, str], datetime] = {}
        self._told: list[Arrival] = []
        self._waits_seconds: list[float] = []
        self._is_ascii = _wants_ascii(self._console)
        self._open = ExitStack()
        self._live: Live | None = None
        self.sinks = (_sink_into(self._arrivals),)

    def begin(self, simulator: Simulator) -> None:
        """Say what is going to be seen."""
        self._simulator = simulator
        simulator.world.listen(self._hear)
        speed = simulator.world.speed
        self._print(Text("Simulated: Azure, and one VM that it live-migrates. Real: the agent watching."))
        self._print(Text(f"Time runs {speed:.0f} times faster: 15 minutes of notice pass in about 10 seconds.\n"))
        if not self._console.is_dumb_terminal:
            live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live = self._open.enter_context(live)

    def look(self) -> None:
        """Print the records that arrived, and draw the panel again."""
        while True:
            try:
                arrival = self._arrivals.get_nowait()
            except Empty:
                break
            self._told.append(arrival)
            self._print(self._card(*arrival))
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)

    def end(self, *, is_whole: bool) -> None:
        """Take the panel away, and say what there was and what to try next."""
        self._open.close()
        if is_whole:
            self._print(self._closing())
        else:
            self._print(Text("Stopped before the end. Nothing is left behind.", style="dim"))

    def _hear(self, change: Change) -> None:
        if change.event is not None:
            at = self._simulator.world.wall_clock(change.at_seconds)
            self._changed_at.setdefault((change.event.event_id, change.what), at)

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, width=self._width, crop=False)

    @property
    def _width(self) -> int:
        return min(self._console.width, _MOST_COLUMNS)

    @property
    def _is_narrow(self) -> bool:
        return self._width < _WIDE_COLUMNS

    def _seconds(self, moment: datetime) -> float:
        """Return *moment* as seconds since the demo began."""
        return (moment - self._simulator.world.wall_clock(0.0)).total_seconds()

    # A record.

    def _card(self, record: TransitionRecord, arrived_at: datetime) -> RenderableType:
        style = _STYLES.get(record.transition, "bold")
        at = f"{self._seconds(arrived_at):4.1f} s"
        what = Text(meaning(record), style="bold")
        rest = [Text(line) for line in (on_call(record),) if line]
        rest.append(Text(self._latency(record, arrived_at), style="dim"))
        if self._is_narrow:
            return Group(Text.assemble(at.lstrip(), " ", (record.transition.value, style)), what, *rest, "")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=_TRANSITION_COLUMNS)
        grid.add_column(ratio=1)
        grid.add_row(at, Text(record.transition.value, style=style), what)
        for line in rest:
            grid.add_row("", "", line)
        return Group(grid, "")

    def _latency(self, record: TransitionRecord, arrived_at: datetime) -> str:
        observed_at = parse_time(record.observed_at)
        handed = max((arrived_at - observed_at).total_seconds(), 0.0) * 1000
        event_id = "" if record.event is None else record.event.event_id or ""
        changed_at = self._changed_at.get((event_id, record.transition.value))
        if changed_at is None:
            return f"At the sink {handed:.0f} ms after the poll."
        self._waits_seconds.append((arrived_at - changed_at).total_seconds())
        seen = max((observed_at - changed_at).total_seconds(), 0.0)
        return f"Seen {seen:.2f} s after the change, at the sink {handed:.0f} ms later."

    # The panel.

    def _panel(self) -> Panel:
        now = utc_now()
        lines: list[RenderableType] = [Text(line, overflow="fold") for line in self._standing(now)]
        return Panel(
            Group(lines[0], self._timeline(now), *lines[1:]),
            title=Text(f"{self._seconds(now):.0f} s of {self._whole_seconds:.0f} s"),
            title_align="right",
            subtitle=Text(event_id) if (event_id := self._event_id()) and not self._is_narrow else None,
            subtitle_align="right",
            box=box.ASCII if self._is_ascii else box.ROUNDED,
            width=self._width,
            border_style="dim",
        )

    def _standing(self, now: datetime) -> tuple[str, str]:
        """Return what the agent knows: the event and its state, and what comes next."""
        record = self._told[-1][0] if self._told else None
        event = None if record is None else record.event
        if record is None or event is None:
            return "No event in the document", "The agent polls once a second."
        who = f"{event.event_type} of {', '.join(event.resources or ())}: "
        if record.transition not in _LIVE_TRANSITIONS:
            return who + record.transition.value, "The document is empty again."
        return who + event.event_status, self._countdown(event, now)

    def _event_id(self) -> str | None:
        event = self._told[-1][0].event if self._told else None
        return None if event is None else event.event_id

    def _countdown(self, event: ScheduledEvent, now: datetime) -> str:
        if event.not_before is None:
            return "It is under way; the document no longer says when it ends."
        left = (event.not_before - now).total_seconds()
        real = duration(round(left * self._simulator.world.speed))
        return f"NotBefore in {left:.1f} s (in Azure: {real})" if left > 0 else "NotBefore is now."

    def _timeline(self, now: datetime) -> Text:
        """Return the time of the demo from left to right, drawn by what the agent knew when, NotBefore marked."""
        columns = max(self._width - 4, 1)
        glyphs = _ASCII if self._is_ascii else _UNICODE
        here = self._column(now, columns)
        cells = [glyphs.quiet] * columns
        for record, arrived_at in self._told:
            glyph = glyphs.of(record.transition)
            arrived = self._column(arrived_at, columns)
            cells[arrived : here + 1] = [glyph] * (here + 1 - arrived)
        not_before = self._told[0][0].event.not_before if self._told and self._told[0][0].event else None
        if not_before is not None:
            cells[self._column(not_before, columns)] = glyphs.not_before
        cells[here] = glyphs.now
        return Text.assemble(*((cell, glyphs.style(cell)) for cell in cells))

    def _column(self, moment: datetime, columns: int) -> int:
        return min(max(int(self._seconds(moment) / self._whole_seconds * columns), 0), columns - 1)

    # The end.

    def _closing(self) -> RenderableType:
        longest = max(self._waits_seconds, default=0.0)
        text = Text()
        text.append(f"{len(self._changed_at)} changes, {len(self._told)} records, none lost. ", style="bold")
        text.append(f"Slowest: {longest:.2f} s, at one poll a second.\nNothing is left behind. Next:")
        called = this_command()
        # Never wrapped: a line that was broken in two cannot be copied from the screen.
        commands = [
            (Text(f"  {called} {command}", style="cyan", no_wrap=True, overflow="ignore"), Text(what))
            for command, what in _NEXT
        ]
        if max(command.cell_len + _GAP_COLUMNS + what.cell_len for command, what in commands) > self._width:
            below = (0, 0, 0, 2 * _GAP_COLUMNS)
            return Group(text, *(part for command, what in commands for part in (command, Padding(what, below))))
        grid = Table.grid(padding=(0, _GAP_COLUMNS))
        for row in commands:
            grid.add_row(*row)
        return Group(text, grid)


class _Above(io.StringIO):
    """Lets log lines appear above the panel instead of across it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def write(self, text: str) -> int:
        """Print *text* as it is."""
        self._console.print(Text(text.rstrip("\n"), style="yellow"))
        return len(text)

    def isatty(self) -> bool:
        """Return False: the colours are the console's business."""
        return False


def _sink_into(arrivals: SimpleQueue[Arrival]) -> SinkSettings:
    """Return a sink that puts each record into *arrivals*, by the road that every sink is on."""

    class ScreenSink(Sink):
        Config: ClassVar[type[SinkConfig]] = SinkConfig

        def send(self, batch: Sequence[TransitionRecord]) -> None:
            for record in batch:
                arrivals.put((record, utc_now()))

    return SinkSettings(type_name=_SINK_NAME, sink_class=ScreenSink, config=SinkConfig(name=_SINK_NAME))


def _wants_ascii(console: Console) -> bool:
    """Return whether the terminal may show anything but ASCII wrongly.

    Python writes UTF-8 also under a locale that is none, such as C (PEP 538, PEP 540), and then turns its UTF-8 mode
    on by itself; the terminal does not know.
    """
    was_forced = bool(sys.flags.utf8_mode) and os.name != "nt" and "PYTHONUTF8" not in os.environ
    return was_forced or not console.encoding.lower().startswith("utf")
