"""Describes simulated events. An event can be written in the format of every API version.

An event has the same EventId in all API versions, but the fields and the event types differ. The table "Version and
region availability" on Microsoft's page "Scheduled Events for Linux VMs" lists the differences. The minimum notice and
the descriptions are from the same page.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from typing import Annotated, Any, Literal

import msgspec

#: The first version that requires the header ``Metadata: true``. Its names have no leading underscore.
HEADER_SINCE = "2017-08-01"
#: Earlier versions require DocumentIncarnation in an approval.
PLAIN_APPROVAL_SINCE = "2019-01-01"

_TYPE_SINCE = {"Preempt": "2017-11-01", "Terminate": "2019-01-01", "SpotRebalanceRecommendation": "2024-07-09"}
_NOTICE_SECONDS = {"Freeze": 900.0, "Reboot": 900.0, "Redeploy": 600.0, "Preempt": 30.0, "Terminate": 300.0}
#: The approximate time from Started until the event leaves the document, according to Microsoft.
_IMPACT_SECONDS = 600.0

_MOST_SECONDS = 1e9
Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MOST_SECONDS)]


class EventChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an event that can change while the event is in the document.

    Durations are in scenario seconds.
    """

    event_type: str = ""
    resources: tuple[str, ...] | None = None
    """The names of the affected VMs. None means every VM of the simulator."""
    notice_seconds: Seconds | None = None
    """The time from Scheduled to NotBefore. None means Azure's minimum for the event type."""
    impact_seconds: Seconds = _IMPACT_SECONDS
    """The time from Started until the event leaves the document."""
    duration_seconds: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """DurationInSeconds: 0 means no impact, and -1 means unknown."""
    description: str = ""
    event_source: str = "Platform"
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Additional JSON fields, which replace fields with the same name."""


class EventSpec(EventChanges, frozen=True, kw_only=True):
    """The description of an event to add."""

    event_type: Annotated[str, msgspec.Meta(min_length=1)]
    event_id: str | None = None
    """The EventId. None means a random UUID in upper case."""
    status: Literal["Scheduled", "Started"] = "Scheduled"
    """The initial status. The first status of a hardware failure is Started."""
    resource_type: str = "VirtualMachine"
    on_approval: Literal["start", "wait", "never"] = "start"
    """start: an approved event starts after *approval_delay_seconds*. wait: at NotBefore. never: it does not start."""
    approval_delay_seconds: Seconds = 0.0
    on_not_before: Literal["start", "stay"] = "start"
    """start: the event starts at NotBefore. stay: the event keeps the status Scheduled after NotBefore."""

    @property
    def notice(self) -> float:
        """Return the time from Scheduled to NotBefore."""
        if self.notice_seconds is not None:
            return self.notice_seconds
        return _NOTICE_SECONDS.get(self.event_type, _NOTICE_SECONDS["Freeze"])


@dataclass(kw_only=True)
class Event:
    """An event in the document. Only the World changes it."""

    spec: EventSpec
    event_id: str
    resources: tuple[str, ...]
    status: str
    not_before_seconds: float
    starts_seconds: float
    ends_seconds: float = math.inf
    is_approved: bool = False


def new_event_id() -> str:
    """Return a random EventId, which is a UUID in upper case as in Azure."""
    return str(uuid.uuid4()).upper()


def shown_event(event: Event, api_version: str, not_before: datetime) -> dict[str, Any] | None:
    """Return *event* in the format of *api_version*; None if the type is not supported."""
    spec = event.spec
    if api_version < _TYPE_SINCE.get(spec.event_type, ""):
        return None
    prefix = "_" if api_version < HEADER_SINCE else ""
    value: dict[str, Any] = {
        "EventId": event.event_id,
        "EventStatus": event.status,
        "EventType": spec.event_type,
        "ResourceType": spec.resource_type,
        "Resources": [prefix + name for name in event.resources],
        "NotBefore": "" if event.status == "Started" else _time_text(not_before, api_version),
    }
    if api_version >= "2019-04-01":
        value["Description"] = spec.description
    if api_version >= "2019-08-01":
        value["EventSource"] = spec.event_source
    if api_version >= "2020-07-01":
        value["DurationInSeconds"] = spec.duration_seconds
    return value | spec.extra


def _time_text(moment: datetime, api_version: str) -> str:
    # Rounded down, because an event must never start before NotBefore.
    whole = moment.replace(microsecond=0)
    if api_version < HEADER_SINCE:
        return whole.strftime("%Y-%m-%dT%H:%M:%SZ")
    return format_datetime(whole, usegmt=True)


def changes_in(read: EventChanges, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of *read* whose names are in *values*."""
    return {name: getattr(read, name) for name in EventChanges.__struct_fields__ if name in values}
