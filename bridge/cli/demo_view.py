"""Displays `demo` on a terminal, with an explanation of each record and a countdown.

The explanations are based on Microsoft's page "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import ClassVar

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from bridge import logs
from bridge.clock import utc_now
from bridge.config.loader import SinkSettings
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import Sink, SinkConfig
from bridge.testing import Scenario
from bridge.text import duration

_MOST_COLUMNS = 78
_INDENT = 20
_STYLES = {Transition.SCHEDULED: "bold bright_magenta", Transition.STARTED: "bold bright_red"}
_ON_CALL = {
    Transition.SCHEDULED: "On call: drain work that cannot tolerate a pause.",
    Transition.STARTED: "On call: this event explains alerts from the VM.",
    Transition.COMPLETED: "On call: return the VM to service.",
}
_NEXT = """\
  demo | head -n 1    Print one record as JSON.
  simulate --list     List more scenarios to try an agent on.
  run --config FILE   Run the agent on a VM. See README.md."""


class Screen:
    """Prints the records that the agent delivers to its sink."""

    def __init__(self, scenario: Scenario) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._speed = scenario.demo_speed
        self._status = self._console.status("", spinner="line")
        self._queue: SimpleQueue[TransitionRecord] = SimpleQueue()
        self._last: TransitionRecord | None = None
        self._count = 0
        self.sinks = (_sink_into(self._queue),)

    def begin(self) -> None:
        """Print an introduction, and start the countdown."""
        self._began_at = time.monotonic()
        self._print("Simulated: Azure, and one VM in a live migration. Real: the agent.")
        self._print(f"Time runs {self._speed:.0f} times faster: 15 minutes of notice pass in 10 seconds.\n")
        self._status.start()
        # rich replaces standard error with a stream that prints above the countdown.
        logs.configure(level=logging.WARNING, form="text", stream=sys.stderr)

    def refresh(self) -> None:
        """Print the new records, and update the countdown."""
        while not self._queue.empty():
            record = self._queue.get()
            self._last, self._count = record, self._count + 1
            at = f"{time.monotonic() - self._began_at:5.1f} s"
            style = _STYLES.get(record.transition, "bold green")
            self._print(f"{at}  {record.transition.value}", style=style)
            self._print(f"{_meaning(record)}\n{_ON_CALL.get(record.transition, '')}", indent=_INDENT)
        self._status.update(self._countdown())

    def end(self, *, is_whole: bool) -> None:
        """Stop the countdown, and print the next steps."""
        self._status.stop()
        if not is_whole:
            self._print("Stopped before the end. Nothing is left behind.")
            return
        self._print(f"\n{self._count} records, none lost. Nothing is left behind.", style="bold")
        self._print(f"\nNext:\n{_NEXT}")

    def _print(self, text: str, *, style: str = "", indent: int = 0) -> None:
        width = min(self._console.width, _MOST_COLUMNS)
        left = indent if width == _MOST_COLUMNS else 0
        self._console.print(Padding(Text(text, style), (0, 0, 0, left), expand=False), width=width)

    def _countdown(self) -> str:
        event = None if self._last is None else self._last.event
        if self._last is None or event is None:
            return "No event in the document. The agent polls once a second."
        if self._last.transition is Transition.STARTED:
            return "The event is in progress. The document does not contain its end."
        if self._last.transition is not Transition.SCHEDULED or event.not_before is None:
            return "The document is empty again."
        left = max((event.not_before - utc_now()).total_seconds(), 0.0)
        return f"NotBefore in {left:.1f} s (in Azure: {duration(left * self._speed)})"


def _meaning(record: TransitionRecord) -> str:
    event = record.event
    kind = "event" if event is None else event.event_type or "event"
    if record.transition is Transition.SCHEDULED:
        impact = f" of {event.duration_seconds} s" if event and event.duration_seconds else ""
        notice = "" if record.notice_seconds is None else f", {record.notice_seconds:.0f} s of notice"
        return f"Azure announced a {kind}{impact}{notice}."
    if record.transition is Transition.STARTED:
        return f"The {kind} began. The VM can pause at any moment."
    if record.transition is Transition.COMPLETED:
        return "The event had started and left the document: it is over."
    return f"The agent recorded {record.transition.value}."


def _sink_into(queue: SimpleQueue[TransitionRecord]) -> SinkSettings:
    class ScreenSink(Sink):
        Config: ClassVar[type[SinkConfig]] = SinkConfig

        def send(self, batch: Sequence[TransitionRecord]) -> None:
            for record in batch:
                queue.put(record)

    return SinkSettings(type_name="screen", sink_class=ScreenSink, config=SinkConfig(name="screen"))
