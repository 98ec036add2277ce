"""One maintenance event: what it is asked to be, and how each version of the API shows it.

Azure keeps one EventId for an event's whole life and shows the event differently to each api-version. The versions'
release notes are in the table "Version and region availability" of Microsoft's page "Scheduled Events for Linux
VMs"; the minimum notice and the descriptions come from the same page.
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

API_VERSIONS = (
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
)
#: The version from which a request without ``Metadata: true`` is refused, and names lose their leading underscore.
HEADER_SINCE = "2017-08-01"
#: The versions before this one want DocumentIncarnation in an approval.
PLAIN_APPROVAL_SINCE = "2019-01-01"

_TYPE_SINCE = {"Preempt": "2017-11-01", "Terminate": "2019-01-01"}
_NOTICE_SECONDS = {"Freeze": 900.0, "Reboot": 900.0, "Redeploy": 600.0, "Preempt": 30.0, "Terminate": 300.0}
#: Microsoft's rough guideline from Started until the event leaves the document.
_IMPACT_SECONDS = 600.0

_MOST_SECONDS = 1e9
Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MOST_SECONDS)]


class EventChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What of an event may change while it is in the document; times are seconds of scenario time."""

    event_type: str = ""
    resources: tuple[str, ...] | None = None
    """The names of the VMs affected. None: every VM of the simulator."""
    notice_seconds: Seconds | None = None
    """From Scheduled to NotBefore. None: Microsoft's minimum for the type."""
    impact_seconds: Seconds = _IMPACT_SECONDS
    """From Started until the event leaves the document."""
    duration_seconds: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """DurationInSeconds: 0 no impact, -1 unknown."""
    description: str = ""
    event_source: str = "Platform"
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further fields of the JSON; they replace fields of the same name."""


class EventSpec(EventChanges, frozen=True, kw_only=True):
    """What an event is asked to be."""

    event_type: Annotated[str, msgspec.Meta(min_length=1)]
    event_id: str | None = None
    """None: a random UUID in upper case."""
    status: Literal["Scheduled", "Started"] = "Scheduled"
    """Started at once is how Azure shows a hardware failure."""
    resource_type: str = "VirtualMachine"
    on_approval: Literal["start", "wait", "never"] = "start"
    """start: after *approval_delay_seconds*; wait: at NotBefore all the same (other tenants); never: not at all."""
    approval_delay_seconds: Seconds = 0.0
    on_not_before: Literal["start", "stay"] = "start"
    """stay: the event stays Scheduled past NotBefore until told."""

    @property
    def notice(self) -> float:
        """Return the seconds from Scheduled to NotBefore."""
        if self.notice_seconds is not None:
            return self.notice_seconds
        return _NOTICE_SECONDS.get(self.event_type, _NOTICE_SECONDS["Freeze"])


@dataclass(kw_only=True)
class Event:
    """An event in the world; only the world changes it."""

    spec: EventSpec
    event_id: str
    resources: tuple[str, ...]
    status: str
    not_before_seconds: float
    starts_seconds: float
    ends_seconds: float = math.inf
    is_approved: bool = False


def new_event_id() -> str:
    """Return a random EventId: a UUID in upper case, as Azure writes it."""
    return str(uuid.uuid4()).upper()


def shown_event(event: Event, api_version: str, not_before: datetime) -> dict[str, Any] | None:
    """Return *event* as *api_version* shows it; None when that version does not know its type."""
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
    # Whole seconds, cut: the event may start a little later than it says, never before.
    whole = moment.replace(microsecond=0)
    if api_version < HEADER_SINCE:
        return whole.strftime("%Y-%m-%dT%H:%M:%SZ")
    return format_datetime(whole, usegmt=True)


def changes_in(read: EventChanges, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of *read* that *values* gives."""
    return {name: getattr(read, name) for name in EventChanges.__struct_fields__ if name in values}
