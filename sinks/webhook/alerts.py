"""Provides the summary, the details, and the link of an alert for the webhook formats.

A `scheduled` or `started` record creates an alert, an `updated` record refreshes it, and a `completed`, `canceled`, or
`ended` record resolves it. Heartbeats and records about approvals do not change alerts.
"""

from __future__ import annotations

from urllib.parse import quote

from bridge.sink import ScheduledEvent, Transition, TransitionRecord, VmIdentity, escaped
from sinks.sentence import first_names, sentence

_BEGINS = frozenset({Transition.SCHEDULED, Transition.STARTED, Transition.UPDATED})
_MOST_NAMES = 3

#: Azure portals by the prefix of the region.
_PORTAL = "portal.azure.com"
_PORTALS = {"usgov": "portal.azure.us", "usdod": "portal.azure.us", "china": "portal.azure.cn"}


def alerting_event(record: TransitionRecord) -> ScheduledEvent | None:
    """Return the event of *record*, or None if the record does not change an alert."""
    transition = record.transition
    is_part = transition in _BEGINS or transition.is_ending or transition is Transition.TEST
    return record.event if is_part else None


def summary(record: TransitionRecord) -> str:
    """Return a summary such as `Reboot of WestNO_0 scheduled, not before 11:15:00 UTC`."""
    event = record.event
    if event is None:
        return escaped(f"{record.transition.value} from {record.vm.name or 'an Azure VM'}")
    names = event.resources or ()
    whom = f" of {first_names(names, _MOST_NAMES)}" if names else ""
    what = "test: nothing happens" if record.transition is Transition.TEST else record.transition.value
    is_ahead = event.not_before is not None and not record.transition.is_ending
    when = f", not before {event.not_before:%Y-%m-%d %H:%M:%S} UTC" if is_ahead else ""
    return escaped(f"{event.event_type or 'Event of unknown type'}{whom} {what}{when}")


def details(record: TransitionRecord) -> str:
    """Return the sentence that describes *record*, without the time."""
    return sentence(record).removeprefix(record.observed_at).strip()


def portal_url(vm: VmIdentity) -> str | None:
    """Return the URL of *vm* in the Azure portal, or None if the resource ID is unknown."""
    if not vm.resource_id or not vm.resource_id.startswith("/"):
        return None
    region = (vm.location or "").lower()
    host = next((host for prefix, host in _PORTALS.items() if region.startswith(prefix)), _PORTAL)
    return f"https://{host}/#@/resource{quote(vm.resource_id)}"
