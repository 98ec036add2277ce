"""The webhook format for PagerDuty (Events API v2).

All VMs in an event's Resources use the same `dedup_key`, so each event has one incident. The first VM that sees the
event end resolves the incident.

By default, Preempt and Terminate events are sent as change events, which do not page anyone. A Preempt gives only 30
seconds' notice, and a deleted VM cannot resolve its incident. To create incidents for these events, set `urgent_as =
"alert"`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from bridge.sink import (
    URGENT_EVENT_TYPES,
    DeliveryError,
    DeliveryFailed,
    DeliveryRejected,
    ScheduledEvent,
    Secret,
    Transition,
    TransitionRecord,
)
from sinks.http.endpoint import Endpoint
from sinks.severity import look_of
from sinks.webhook.alerts import alerting_event, summary
from sinks.webhook.format import Format, Message

#: PagerDuty: Events API v2, "Send an alert event" and "Send a change event".
DEFAULT_URL = "https://events.pagerduty.com/v2/enqueue"
_ALERT_PATH = "/v2/enqueue"
_CHANGE_PATH = "/v2/change/enqueue"
_MOST_KEY_CHARACTERS = 255
_MOST_SUMMARY_CHARACTERS = 1024
_CHECK_FAILS = frozenset({407})
_CLIENT = "scheduled-events-bridge"


class PagerDutyFormat(Format):
    """Sends records as alert events or change events to PagerDuty."""

    def __init__(self, routing_key: Secret, *, urgent_as: Literal["change", "alert"]) -> None:
        self._routing_key = routing_key
        self._urgent_as_change = urgent_as == "change"
        self.secrets = (routing_key,)

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the event, or None if the record does not change an alert."""
        del now
        event = alerting_event(record)
        if event is None:
            return None
        if self._is_change(record):
            body, target = {"payload": _payload(record)}, url.removesuffix(_ALERT_PATH) + _CHANGE_PATH
        else:
            body, target = _alert(record, event, is_over=self._is_over(record)), url
        return Message(
            target, msgspec.json.encode({"routing_key": self._routing_key.value(), **body}), "application/json"
        )

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> None:
        """Send an OPTIONS request, which creates no event in PagerDuty."""
        endpoint_of(url).check(failing=_CHECK_FAILS)

    def refused(self, error: DeliveryRejected) -> DeliveryError:
        """Return DeliveryFailed if PagerDuty rejected the routing key."""
        if "routing_key" in str(error).lower().replace(" ", "_"):
            return DeliveryFailed(f"{error} Check routing_key_file or routing_key_env.", needs_attention=True)
        return error

    def _is_change(self, record: TransitionRecord) -> bool:
        if record.transition is Transition.TEST:
            return True
        # Always resolve an open incident, even if the new type of the event does not create incidents.
        return self._urgent_as_change and record.is_urgent and not _was_alert(record)

    def _is_over(self, record: TransitionRecord) -> bool:
        return record.transition.is_ending or (self._urgent_as_change and record.is_urgent)


def check_url(url: str) -> None:
    """Raise ValueError unless *url* ends with the path for alert events."""
    parts = urlsplit(url)
    if not url.endswith(_ALERT_PATH) or parts.query or parts.fragment:
        raise ValueError(f"url must end in {_ALERT_PATH} for format = 'pagerduty'. The default is {DEFAULT_URL}.")


def _payload(record: TransitionRecord) -> dict[str, Any]:
    return {
        "summary": summary(record)[:_MOST_SUMMARY_CHARACTERS],
        "source": record.vm.resource_id or record.vm.name or record.vm.vm_id or "azure-vm",
        "timestamp": record.observed_at,
        "custom_details": record,
    }


def _alert(record: TransitionRecord, event: ScheduledEvent, *, is_over: bool) -> dict[str, Any]:
    sorting = {
        "severity": look_of(record).severity,
        "class": event.event_type,
        "component": record.vm.name,
        "group": record.vm.scale_set or record.vm.resource_group,
    }
    return {
        "event_action": "resolve" if is_over else "trigger",
        "dedup_key": dedup_key(record),
        "client": _CLIENT,
        "payload": _payload(record) | {name: value for name, value in sorting.items() if value},
    }


def dedup_key(record: TransitionRecord) -> str:
    """Return the key of the incident, which is the same on all VMs that the event names."""
    key = f"azure-scheduled-event/{record.event_key}"
    if len(key) <= _MOST_KEY_CHARACTERS:
        return key
    return f"azure-scheduled-event/{hashlib.sha256(record.event_key.encode()).hexdigest()}"


def _was_alert(record: TransitionRecord) -> bool:
    before = (record.previous or {}).get("event_type")
    return "event_type" in record.changed and before not in URGENT_EVENT_TYPES
