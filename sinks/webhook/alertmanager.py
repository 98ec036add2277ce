"""A record as an alert of Prometheus Alertmanager (API v2): fires, is refreshed, resolves.

Alertmanager knows an alert by its labels, so they hold only what stays the same for the life of an event: no status,
no NotBefore. Where Azure changes the type or the source after all (a Reboot may turn out a Freeze), the alert under
the old labels is resolved in the same request.

`endsAt` is always set, because the agent may not live to resolve the alert: max(now, NotBefore) + 24 h, and + 15 min
for Preempt and Terminate, which take the agent with them. Alertmanager takes an end in its own future for a mere
refresh and then keeps the later of the two (provider/mem, Alert.Merge), so a resolve from a clock that is ahead would
be lost without an error: an end is sent as two seconds ago, and where the `Date` of the answer shows that this was
still the future, the send has failed and the next one counts by Alertmanager's clock.

Alertmanager keeps alerts in memory and its members do not exchange them: configure one sink for each member of a
cluster. While this VM's name is unknown its alerts have no `vm_name`; those end at their `endsAt` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
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
from sinks.http.endpoint import Endpoint, parse_json
from sinks.webhook.alerts import Severity, alerting_event, details, severity, summary
from sinks.webhook.format import Format, Message

_ALERTS_PATH = "/api/v2/alerts"
_STATUS_PATH = "/api/v2/status"

_LIFE = timedelta(hours=24)
_URGENT_LIFE = timedelta(minutes=15)
_TEST_LIFE = timedelta(minutes=5)
_MARGIN = timedelta(seconds=2)

_NO_LABEL_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")


class AlertmanagerFormat(Format):
    """Makes the alerts of one Alertmanager, and remembers how far its clock is behind ours."""

    def __init__(self) -> None:
        self._behind = timedelta(0)
        self._doubted: str | None = None

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return a list with the alert; None for what is no part of an event's life."""
        event = alerting_event(record)
        if event is None:
            return None
        ends_at = self._ends_at(record, event, now)
        alerts = [_alert(record, _labels(record, event), ends_at)]
        earlier = _earlier(record, event)
        if earlier is not None:
            alerts.insert(0, _alert(record, _labels(record, earlier), self._past(now)))
        return Message(alerts_url(url), msgspec.json.encode(alerts), "application/json")

    def accepted(self, record: TransitionRecord, headers: Mapping[str, str], now: datetime) -> None:
        """Raise DeliveryFailed when the end that *record* was sent with still lay in Alertmanager's future."""
        theirs = _date(headers.get("Date", ""))
        if theirs is None:
            return
        believed, self._behind = self._behind, max(timedelta(0), now - theirs)
        is_lost = record.transition.is_ending and self._behind > believed + _MARGIN
        # Once for each record: the Date of a proxy may be anything.
        if is_lost and self._doubted != record.id:
            self._doubted = record.id
            raise DeliveryFailed(
                f"Alertmanager's clock is about {self._behind.total_seconds():.0f} s behind this VM's, so it took the "
                "end of an event for a refresh. The end is sent again by its clock. Set the clocks right.",
                uncertain=True,
            )

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> None:
        """Ask Alertmanager for its status."""
        endpoint = endpoint_of(status_url(url))
        answer = parse_json(endpoint.check("GET").content)
        if not isinstance(answer, dict) or "versionInfo" not in answer:
            raise DeliveryFailed(
                f"{endpoint.shown} does not answer as Alertmanager does. Check the URL.", needs_attention=True
            )

    def _ends_at(self, record: TransitionRecord, event: ScheduledEvent, now: datetime) -> datetime:
        if record.transition.is_ending:
            return self._past(now)
        if record.transition is Transition.TEST:
            return now + _TEST_LIFE
        begins = now if event.not_before is None else max(now, event.not_before)
        return begins + (_URGENT_LIFE if event.is_urgent else _LIFE)

    def _past(self, now: datetime) -> datetime:
        return now - _MARGIN - self._behind


def alerts_url(base: str) -> str:
    """Return where alerts go: *base* may be Alertmanager's own address or that of its API."""
    return base if base.endswith(_ALERTS_PATH) else base.rstrip("/") + _ALERTS_PATH


def status_url(base: str) -> str:
    """Return where to ask Alertmanager how it is."""
    return alerts_url(base).removesuffix(_ALERTS_PATH) + _STATUS_PATH


def _alert(record: TransitionRecord, labels: dict[str, str], ends_at: datetime) -> dict[str, Any]:
    return {
        "labels": labels,
        "annotations": _annotations(record),
        # Not after its end: Alertmanager refuses that.
        "startsAt": format_time(min(parse_time(record.observed_at), ends_at)),
        "endsAt": format_time(ends_at),
    }


def _labels(record: TransitionRecord, event: ScheduledEvent) -> dict[str, str]:
    """Return what routes and silences go by; the configuration's labels are among them, and never replace ours."""
    vm = record.vm
    ours = {
        "alertname": "AzureScheduledEvent",
        "event_id": event.key,
        "event_type": event.event_type,
        "event_source": event.event_source,
        "severity": Severity.INFO if record.transition is Transition.TEST else severity(event.event_type),
        "vm_name": vm.name or vm.vm_id,
        "region": vm.location,
        "resource_group": vm.resource_group,
        "subscription_id": vm.subscription_id,
        "scale_set": vm.scale_set,
    }
    labels = {_label_name(name): value for name, value in record.labels.items()}
    labels.update({name: value for name, value in ours.items() if value})
    return {name: value for name, value in labels.items() if name and value}


def _label_name(name: str) -> str:
    """Return *name* as Prometheus spells label names."""
    spelt = _NO_LABEL_CHARACTER.sub("_", name)
    return f"_{spelt}" if spelt[:1].isdigit() else spelt


def _annotations(record: TransitionRecord) -> dict[str, str]:
    event = record.event
    texts = {
        "summary": summary(record),
        "description": details(record),
        "transition": record.transition.value,
        "evidence": record.evidence.value,
        "record_id": record.id,
        "resource_id": record.vm.resource_id,
        "event_status": event and event.event_status,
        "resources": event and ", ".join(event.resources or ()),
        "not_before": event and event.not_before and format_time(event.not_before),
    }
    return {name: escaped(text) for name, text in texts.items() if text}


def _earlier(record: TransitionRecord, event: ScheduledEvent) -> ScheduledEvent | None:
    """Return the event with the type and the source it had, when either changed; else None."""
    previous = record.previous or {}
    changed = {name: previous.get(name) for name in ("event_type", "event_source") if name in record.changed}
    if not changed or event.event_id is None:  # without an EventId it would be another event
        return None
    return msgspec.structs.replace(event, **changed)


def _date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
