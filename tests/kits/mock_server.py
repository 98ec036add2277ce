"""The documents of Microsoft's scheduled-events-mock-server, reconstructed from its behavior.

It holds one event at a time. At each status it draws a new EventId and raises the incarnation; NotBefore is in ISO 8601
and 15 minutes after the announcement; a status that ends an event shows an empty document; choosing a scenario empties
the document under the same incarnation. Each of its six scenarios comes in the times of Azure and, called "Dev Timing",
with seconds for minutes but for NotBefore: there the impact begins 15 minutes before NotBefore is over.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

NOTICE = timedelta(minutes=15)
VM = "vmss_vm1"


@dataclass(frozen=True, kw_only=True)
class MockScenario:
    """One scenario: the event, and the minutes of each status except the last one."""

    name: str
    event_type: str
    event_source: str
    duration_seconds: int
    description: str
    statuses: tuple[tuple[str, int], ...]
    is_dev_timing: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def is_canceled(self) -> bool:
        return "Started" not in dict(self.statuses)

    def seconds(self, minutes: int) -> int:
        """Return the duration of a status of *minutes*."""
        return minutes if self.is_dev_timing else minutes * 60


def _scenario(name: str, event_type: str, source: str, duration_seconds: int, description: str, *minutes: int) -> Any:
    statuses = tuple(zip(("Scheduled", "Started"), minutes, strict=False))
    return [
        MockScenario(
            name=name + suffix,
            event_type=event_type,
            event_source=source,
            duration_seconds=duration_seconds,
            description=description,
            statuses=statuses,
            is_dev_timing=bool(suffix),
        )
        for suffix in (" - Dev Timing", "")
    ]


_MOVED = "Virtual machine is being paused because of a memory-preserving Live Migration operation."
_MAINTAINED = "Host server is undergoing maintenance."
_ASKED = "Virtual machine is going to be {} as requested by authorized user."
SCENARIOS: tuple[MockScenario, ...] = (
    *_scenario("Live Migration", "Freeze", "Platform", 5, _MOVED, 15, 5),
    *_scenario("User Reboot", "Reboot", "User", -1, _ASKED.format("restarted"), 15, 10),
    *_scenario("Host Agent Maintenance", "Freeze", "Platform", 9, _MAINTAINED, 15, 10),
    *_scenario("Redeploy", "Redeploy", "Platform", -1, "Virtual machine has encountered a failure.", 15, 10),
    *_scenario("User Redeploy", "Redeploy", "User", -1, _ASKED.format("redeployed"), 15, 10),
    *_scenario("Canceled Maintenance", "Freeze", "Platform", 9, _MAINTAINED, 8),
)


class MockServer:
    """The state of the mock server across scenarios."""

    def __init__(self) -> None:
        self.incarnation = 1

    def play(self, scenario: MockScenario, now: datetime) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield each status from *now* on with its duration in seconds and its document. The last one is `Over`."""
        not_before = (now + NOTICE).strftime("%Y-%m-%dT%H:%M:%SZ")
        yield "Chosen", 1, self._document()
        for status, minutes in scenario.statuses:
            self.incarnation += 1
            event = {
                "EventId": str(uuid.uuid4()),
                "EventStatus": status,
                "EventType": scenario.event_type,
                "ResourceType": "VirtualMachine",
                "Resources": [VM],
                "EventSource": scenario.event_source,
                "NotBefore": "" if status == "Started" else not_before,
                "Description": scenario.description,
                "DurationInSeconds": scenario.duration_seconds,
            }
            yield status, scenario.seconds(minutes), self._document(event)
        self.incarnation += 1
        yield "Over", 1, self._document()

    def _document(self, *events: dict[str, Any]) -> dict[str, Any]:
        return {"DocumentIncarnation": self.incarnation, "Events": list(events)}
