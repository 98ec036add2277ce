"""The webhook format for Prometheus Alertmanager (API v2).

Alertmanager identifies an alert by its labels, so the labels contain only values that normally stay the same. If Azure
changes an event's type or source, one request resolves the alert with the old labels and creates an alert with the new
labels.

Alertmanager loses its alerts when it restarts, so the agent resends each active alert every `refresh_seconds`. An alert
ends after four intervals without a refresh, for example because its VM was deleted.

To resolve an alert, the sink sets `endsAt` to ten seconds in the past. If the VM's clock is ahead, `endsAt` could
otherwise be in the future, and Alertmanager would treat it as a refresh.

The members of an Alertmanager cluster do not share alerts, so configure one sink for each member.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from bridge.sink import (
    DeliveryFailed,
    ScheduledEvent,
    Transition,
    TransitionRecord,
    escaped,
    format_time,
    parse_time,
)
from sinks.http.endpoint import Endpoint
from sinks.severity import active_look, look_of
from sinks.webhook.alerts import alerting_event, details, portal_url, summary
from sinks.webhook.format import Format, Message

_ALERTS_PATH = "/api/v2/alerts"
_STATUS_PATH = "/api/v2/status"

#: The default refresh interval.
REFRESH_SECONDS = 180.0
_REFRESHES_IN_A_LIFE = 4
_TEST_LIFE = timedelta(minutes=5)
_MARGIN = timedelta(seconds=10)

_NO_LABEL_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")


class AlertmanagerFormat(Format):
    """Sends records as alerts. *tag_labels* names the VM tags to add as labels."""

    def __init__(self, *, refresh_seconds: float = REFRESH_SECONDS, tag_labels: Sequence[str] = ()) -> None:
        self._life = timedelta(seconds=refresh_seconds) * _REFRESHES_IN_A_LIFE
        self._tag_labels = tuple(tag_labels)

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return a list of alerts, or None if the record does not change an alert."""
        event = alerting_event(record)
        if event is None:
            return None
        alerts = [_alert(record, self._labels(record, event), self._ends_at(record, now))]
        earlier = _earlier(record, event)
        if earlier is not None:
            alerts.insert(0, _alert(record, self._labels(record, earlier), now - _MARGIN))
        return Message(alerts_url(url), msgspec.json.encode(alerts), "application/json")

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> None:
        """Request the status of Alertmanager."""
        endpoint = endpoint_of(alerts_url(url).removesuffix(_ALERTS_PATH) + _STATUS_PATH)
        try:
            has_version = "versionInfo" in json.loads(endpoint.check("GET").content)
        except (ValueError, TypeError, RecursionError):
            has_version = False
        if not has_version:
            raise DeliveryFailed(
                f"{endpoint.shown} does not respond like Alertmanager. Check the URL.", needs_attention=True
            )

    def _ends_at(self, record: TransitionRecord, now: datetime) -> datetime:
        if record.transition.is_ending:
            return now - _MARGIN
        return now + (_TEST_LIFE if record.transition is Transition.TEST else self._life)

    def _labels(self, record: TransitionRecord, event: ScheduledEvent) -> dict[str, str]:
        labels = _tags(record, self._tag_labels) | record.labels
        spelt = {_label_name(name): value for name, value in labels.items()} | _own_labels(record, event)
        return {name: value for name, value in spelt.items() if name and value}


def alerts_url(base: str) -> str:
    """Return the URL for alerts. *base* can be the URL of Alertmanager or of its API."""
    return base if base.endswith(_ALERTS_PATH) else base.rstrip("/") + _ALERTS_PATH


def _alert(record: TransitionRecord, labels: dict[str, str], ends_at: datetime) -> dict[str, Any]:
    generator_url = portal_url(record.vm)
    return {
        "labels": labels,
        "annotations": _annotations(record),
        # Alertmanager rejects a start after the end.
        "startsAt": format_time(min(parse_time(record.observed_at), ends_at)),
        "endsAt": format_time(ends_at),
        **({} if generator_url is None else {"generatorURL": generator_url}),
    }


def _own_labels(record: TransitionRecord, event: ScheduledEvent) -> dict[str, str]:
    vm = record.vm
    # Labels identify an alert, so the ending of an event keeps the severity of the active event.
    look = look_of(record) if record.transition is Transition.TEST else active_look(event.event_type)
    ours = {
        "alertname": "AzureScheduledEvent",
        "event_id": event.key,
        "event_type": event.event_type,
        "event_source": event.event_source,
        "severity": look.severity.value,
        "vm_name": vm.name or vm.vm_id,
        "region": vm.location,
        "resource_group": vm.resource_group,
        "subscription_id": vm.subscription_id,
        "scale_set": vm.scale_set,
    }
    return {name: value for name, value in ours.items() if value}


def _tags(record: TransitionRecord, names: Sequence[str]) -> dict[str, str]:
    """Return the tags with *names*. The names of Azure tags are case-insensitive."""
    values = {name.casefold(): value for name, value in record.vm.tags.items()}
    return {name: values[name.casefold()] for name in names if name.casefold() in values}


def _label_name(name: str) -> str:
    spelt = _NO_LABEL_CHARACTER.sub("_", name)
    return f"_{spelt}" if spelt[:1].isdigit() else spelt


def _annotations(record: TransitionRecord) -> dict[str, str]:
    event = record.event
    sender = f", reported by {record.vm.name}" if record.vm.name else ""
    texts = {
        "summary": f"{summary(record)}{sender}",
        "description": details(record),
        "transition": record.transition.value,
        "evidence": record.evidence.value,
        "record_id": record.id,
        "resource_id": record.vm.resource_id,
        "event_status": event and event.event_status,
        "measured_pause_seconds": None
        if record.impact is None or record.impact.longest_seconds is None
        else f"{record.impact.longest_seconds:g}",
        "resources": event and ", ".join(event.resources or ()),
        "not_before": event and event.not_before and format_time(event.not_before),
    }
    return {name: escaped(text) for name, text in texts.items() if text}


def _earlier(record: TransitionRecord, event: ScheduledEvent) -> ScheduledEvent | None:
    """Return the event with its previous type and source, or None if they have not changed."""
    previous = record.previous or {}
    changed = {name: previous.get(name) for name in ("event_type", "event_source") if name in record.changed}
    if not changed or event.event_id is None:  # the type is part of the key of such an event
        return None
    return msgspec.structs.replace(event, **changed)
