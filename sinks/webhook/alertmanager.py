"""A record as an alert of Prometheus Alertmanager (API v2): fires, is refreshed, resolves.

Alertmanager knows an alert by its labels, so they hold only what stays the same for the life of an event: no status,
no NotBefore. Where Azure changes the type or the source after all (a Reboot may turn out a Freeze), the alert under
the old labels is resolved in the same request.

Alertmanager keeps alerts in memory alone and forgets them on a restart, so the host sends each active one again every
`refresh_seconds`. `endsAt` is always set, to four times that from now, as Prometheus does it: an alert whose VM is
deleted ends with it, and so does one whose labels changed. An end that is told is sent as two seconds ago, because
Alertmanager takes one in its own future for a mere refresh and then keeps the later of the two (provider/mem,
Alert.Merge), without an error. Where the `Date` of the answer shows that the clocks differ so much that an end was
still the future, or an alert over on arrival, the send has failed, and the next one counts by Alertmanager's clock.

Members of a cluster do not exchange alerts: configure one sink for each. While this VM's name is unknown its alerts
have no `vm_name`; those end at their `endsAt` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

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

#: How often the host tells an active alert again, unless the configuration says otherwise.
REFRESH_SECONDS = 180.0
_REFRESHES_IN_A_LIFE = 4
_TEST_LIFE = timedelta(minutes=5)
_MARGIN = timedelta(seconds=2)

#: The portals of the clouds, by how the names of their regions begin.
_PORTAL = "portal.azure.com"
_PORTALS = {"usgov": "portal.azure.us", "usdod": "portal.azure.us", "china": "portal.azure.cn"}

_NO_LABEL_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")


class AlertmanagerFormat(Format):
    """Makes the alerts of one Alertmanager, and remembers how far its clock is ahead of ours, or behind.

    The host tells it again every *refresh_seconds*. The VM's tags called *tag_labels* become labels.
    """

    def __init__(self, *, refresh_seconds: float = REFRESH_SECONDS, tag_labels: Sequence[str] = ()) -> None:
        self._refresh = timedelta(seconds=refresh_seconds)
        self._life = self._refresh * _REFRESHES_IN_A_LIFE
        self._tag_labels = tuple(tag_labels)
        self._ahead = timedelta(0)
        self._doubted: str | None = None

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return a list with the alert; None for what is no part of an event's life."""
        event = alerting_event(record)
        if event is None:
            return None
        alerts = [_alert(record, self._labels(record, event), self._ends_at(record, now))]
        earlier = _earlier(record, event)
        if earlier is not None:
            alerts.insert(0, _alert(record, self._labels(record, earlier), self._past(now)))
        return Message(alerts_url(url), msgspec.json.encode(alerts), "application/json")

    def accepted(self, record: TransitionRecord, headers: Mapping[str, str], now: datetime) -> None:
        """Raise DeliveryFailed when Alertmanager's clock makes of *record* something else than it says."""
        theirs = _date(headers.get("Date", ""))
        if theirs is None:
            return
        believed, self._ahead = self._ahead, theirs - now
        took_for = self._taken_for(record, believed)
        # Once for each record: the Date of a proxy may be anything.
        if took_for is not None and self._doubted != record.id:
            self._doubted = record.id
            side = "behind" if self._ahead < timedelta(0) else "ahead of"
            raise DeliveryFailed(
                f"Alertmanager's clock is about {abs(self._ahead).total_seconds():.0f} s {side} this VM's, so it took "
                f"{took_for}. It is sent again by its clock. Set the clocks right."
            )

    def _taken_for(self, record: TransitionRecord, believed: timedelta) -> str | None:
        """Return what *record* was taken for, sent when its clock was *believed* so far ahead; None: what it says."""
        zero = timedelta(0)
        if record.transition.is_ending:
            return (
                "the end of an event for a refresh" if min(self._ahead, zero) < min(believed, zero) - _MARGIN else None
            )
        is_test = record.transition is Transition.TEST
        # Less than one refresh would be left of it.
        is_over = max(self._ahead, zero) - max(believed, zero) >= self._life - self._refresh
        return "an alert for one that is over" if is_over and not is_test else None

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> int:
        """Ask Alertmanager for its status."""
        endpoint = endpoint_of(status_url(url))
        response = endpoint.check("GET")
        answer = parse_json(response.content)
        if not isinstance(answer, dict) or "versionInfo" not in answer:
            raise DeliveryFailed(
                f"{endpoint.shown} does not answer as Alertmanager does. Check the URL.", needs_attention=True
            )
        return response.status_code

    def _ends_at(self, record: TransitionRecord, now: datetime) -> datetime:
        if record.transition.is_ending:
            return self._past(now)
        life = _TEST_LIFE if record.transition is Transition.TEST else self._life
        return now + life + max(self._ahead, timedelta(0))

    def _past(self, now: datetime) -> datetime:
        return now - _MARGIN + min(self._ahead, timedelta(0))

    def _labels(self, record: TransitionRecord, event: ScheduledEvent) -> dict[str, str]:
        """Return what routes and silences go by; chosen tags and the configuration's labels replace none of ours."""
        labels = _tags(record, self._tag_labels) | record.labels
        spelt = {_label_name(name): value for name, value in labels.items()} | _own_labels(record, event)
        return {name: value for name, value in spelt.items() if name and value}


def alerts_url(base: str) -> str:
    """Return where alerts go: *base* may be Alertmanager's own address or that of its API."""
    return base if base.endswith(_ALERTS_PATH) else base.rstrip("/") + _ALERTS_PATH


def status_url(base: str) -> str:
    """Return where to ask Alertmanager how it is."""
    return alerts_url(base).removesuffix(_ALERTS_PATH) + _STATUS_PATH


def _alert(record: TransitionRecord, labels: dict[str, str], ends_at: datetime) -> dict[str, Any]:
    generator_url = _generator_url(record)
    return {
        "labels": labels,
        "annotations": _annotations(record),
        # Not after its end: Alertmanager refuses that.
        "startsAt": format_time(min(parse_time(record.observed_at), ends_at)),
        "endsAt": format_time(ends_at),
        **({} if generator_url is None else {"generatorURL": generator_url}),
    }


def _own_labels(record: TransitionRecord, event: ScheduledEvent) -> dict[str, str]:
    vm = record.vm
    ours = {
        "alertname": "AzureScheduledEvent",
        "event_id": event.key,
        "event_type": event.event_type,
        "event_source": event.event_source,
        "severity": Severity.INFO.value if record.transition is Transition.TEST else severity(event.event_type).value,
        "vm_name": vm.name or vm.vm_id,
        "region": vm.location,
        "resource_group": vm.resource_group,
        "subscription_id": vm.subscription_id,
        "scale_set": vm.scale_set,
    }
    return {name: value for name, value in ours.items() if value}


def _tags(record: TransitionRecord, names: Sequence[str]) -> dict[str, str]:
    """Return those of the VM's tags that are called *names*; Azure compares a tag's name without case."""
    values = {name.casefold(): value for name, value in record.vm.tags.items()}
    return {name: values[name.casefold()] for name in names if name.casefold() in values}


def _generator_url(record: TransitionRecord) -> str | None:
    """Return the VM's page in the Azure portal of its cloud, None when its resource id is unknown."""
    resource_id = record.vm.resource_id
    if not resource_id or not resource_id.startswith("/"):
        return None
    region = (record.vm.location or "").lower()
    host = next((host for prefix, host in _PORTALS.items() if region.startswith(prefix)), _PORTAL)
    return f"https://{host}/#resource{quote(resource_id)}"


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
