"""Implements the `eventlog` sink, which writes each record to the Windows event log.

Each entry contains a readable sentence, followed by the record as JSON. Each transition has its own Windows event ID,
so a scheduled task can react to one transition. The severity of the record determines the level of the entry.

The sink requires the Python package pywin32, which the Windows service installer includes. If the event source is not
registered with Windows, the event log shows a warning above the text (docs/howto/windows.md).

An entry can contain at most 31,839 characters (Microsoft, "ReportEventW function").
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from bridge.sink import (
    DeliveryFailed,
    DeliveryRejected,
    SinkConfig,
    Transition,
    TransitionRecord,
    encode,
)
from sinks.blocking import BlockingSink
from sinks.sentence import sentence
from sinks.severity import Severity, look_of

#: Subscriptions depend on these IDs, so the IDs never change.
EVENT_IDS = {
    Transition.SCHEDULED: 1,
    Transition.STARTED: 2,
    Transition.UPDATED: 3,
    Transition.COMPLETED: 4,
    Transition.CANCELED: 5,
    Transition.ENDED: 6,
    Transition.APPROVED: 11,
    Transition.APPROVAL_REFUSED: 12,
    Transition.APPROVAL_FAILED: 13,
    Transition.HEARTBEAT: 21,
    Transition.TEST: 22,
}
#: EVENTLOG_ERROR_TYPE and the other event types (winnt.h).
_LEVELS = {Severity.CRITICAL: 1, Severity.WARNING: 2, Severity.INFO: 4}
_MOST_CHARACTERS = 31_839
#: Access is denied, or the log is corrupt, cannot be opened, or is full (winerror.h).
_NEEDS_A_PERSON = frozenset({5, 1500, 1501, 1502})
_LOG = "The Windows event log"


class EventLogConfig(SinkConfig, frozen=True, kw_only=True):
    """The settings of the sink type `eventlog`."""

    source: str = "scheduled-events-bridge"
    """The source of the events. An unregistered source writes to the Application log."""

    def __post_init__(self) -> None:
        if self.max_batch != 1:
            raise ValueError(
                f"max_batch is {self.max_batch}, but each event log entry contains one record. Remove max_batch."
            )
        if not self.source.strip() or "\\" in self.source or not self.source.isprintable():
            raise ValueError("source must be a name without backslashes.")
        if importlib.util.find_spec("win32evtlog") is None:
            raise ValueError("type eventlog needs Windows and pywin32, which deploy/windows/install.ps1 installs.")


class EventLogSink(BlockingSink):
    """Writes each record as one entry to the Windows event log."""

    Config: ClassVar[type[SinkConfig]] = EventLogConfig

    def __init__(self, config: EventLogConfig) -> None:
        super().__init__(config, target=_LOG)

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Write the record in *batch*. Raise DeliveryRejected if the record is too long."""
        (record,) = batch
        text = f"{sentence(record)}\r\n\r\n{encode(record).decode()}"
        if len(text.encode("utf-16-le")) // 2 > _MOST_CHARACTERS:
            raise DeliveryRejected(f"The record has more than {_MOST_CHARACTERS} characters, the limit of an event.")
        level = _LEVELS[look_of(record).severity]
        self.run(partial(self._report, EVENT_IDS[record.transition], level, text))

    def check(self) -> None:
        """Open the event log without writing an entry."""
        self.run(partial(self._report, None, 0, ""))

    def _report(self, event_id: int | None, level: int, text: str) -> None:
        import pywintypes  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: PLC0415  # only on Windows
        import win32evtlog  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: PLC0415  # only on Windows

        try:
            handle = win32evtlog.RegisterEventSource(None, self.config.source)
            try:
                if event_id is not None:
                    win32evtlog.ReportEvent(handle, level, 0, event_id, None, [text], None)
            finally:
                win32evtlog.DeregisterEventSource(handle)
        except pywintypes.error as error:
            message = f"{_LOG} did not accept the event: {error.strerror} (error {error.winerror})."
            raise DeliveryFailed(message, needs_attention=error.winerror in _NEEDS_A_PERSON) from error
