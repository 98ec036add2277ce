"""One maintenance event: what it is asked to be, and how each version of the API shows it.

Azure keeps one EventId for an event's whole life and shows the event differently to each api-version. The versions'
release notes are in the table "Version and region availability" of Microsoft's page "Scheduled Events for Linux
VMs"; the minimum notice and the descriptions come from the same page.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import format_datetime
from typing import Any

from bridge.testing.table import Table

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

STATUSES = ("Scheduled", "Started")
ON_APPROVAL = ("start", "wait", "never")
ON_NOT_BEFORE = ("start", "stay")


@dataclass(frozen=True, kw_only=True)
class EventSpec:
    """What an event is asked to be; times are seconds of scenario time."""

    event_type: str
    resources: tuple[str, ...] | None = None
    """The names of the VMs affected. Null: every VM of the simulator."""
    event_id: str | None = None
    """Null: a random UUID in upper case."""
    status: str = "Scheduled"
    """Started at once is how Azure shows a hardware failure."""
    notice_seconds: float | None = None
    """From Scheduled to NotBefore. Null: Microsoft's minimum for the type."""
    impact_seconds: float = _IMPACT_SECONDS
    """From Started until the event leaves the document; infinite: until told."""
    duration_seconds: int = -1
    """DurationInSeconds: 0 no impact, -1 unknown."""
    description: str = ""
    event_source: str = "Platform"
    resource_type: str = "VirtualMachine"
    on_approval: str = "start"
    """start: after *approval_delay_seconds*; wait: at NotBefore all the same (other tenants); never: not at all."""
    approval_delay_seconds: float = 0.0
    on_not_before: str = "start"
    """stay: the event stays Scheduled past NotBefore until told."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the JSON; they replace fields of the same name."""

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
    """Return *event* as *api_version* shows it; null when that version does not know its type."""
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
    return value | dict(spec.extra)


def _time_text(moment: datetime, api_version: str) -> str:
    # Whole seconds, cut: the event may start a little later than it says, never before.
    whole = moment.replace(microsecond=0)
    if api_version < HEADER_SINCE:
        return whole.strftime("%Y-%m-%dT%H:%M:%SZ")
    return format_datetime(whole, usegmt=True)


def read_event(table: Table) -> EventSpec:
    """Return the event that *table* describes; its mistakes are noted in the table."""
    event_type = table.text("event_type")
    if not event_type:
        table.say("event_type is missing: Freeze, Reboot, Redeploy, Preempt or Terminate.")
    notice = table.number("notice_seconds", -1.0)
    return EventSpec(
        event_type=event_type,
        resources=table.texts("resources"),
        event_id=table.text("event_id") or None,
        status=table.choice("status", "Scheduled", STATUSES),
        notice_seconds=None if notice < 0 else notice,
        impact_seconds=table.number("impact_seconds", _IMPACT_SECONDS, or_never=True),
        duration_seconds=table.whole("duration_seconds", -1, minimum=-1),
        description=table.text("description"),
        event_source=table.text("event_source", "Platform"),
        resource_type=table.text("resource_type", "VirtualMachine"),
        on_approval=table.choice("on_approval", "start", ON_APPROVAL),
        approval_delay_seconds=table.number("approval_delay_seconds", 0.0),
        on_not_before=table.choice("on_not_before", "start", ON_NOT_BEFORE),
        extra=table.mapping("extra"),
    )


def read_changes(table: Table) -> dict[str, Any]:
    """Return the fields of an event that *table* changes, by the names of `EventSpec`."""
    changes: dict[str, Any] = {}
    for key in ("event_type", "description", "event_source"):
        if key in table:
            changes[key] = table.text(key)
    if "notice_seconds" in table:
        changes["notice_seconds"] = table.number("notice_seconds", 0.0)
    if "impact_seconds" in table:
        changes["impact_seconds"] = table.number("impact_seconds", 0.0, or_never=True)
    if "duration_seconds" in table:
        changes["duration_seconds"] = table.whole("duration_seconds", -1, minimum=-1)
    if "resources" in table:
        changes["resources"] = table.texts("resources")
    if "extra" in table:
        changes["extra"] = table.mapping("extra")
    if not changes:
        table.say("an update changes at least one field, for example notice_seconds or duration_seconds.")
    return changes
