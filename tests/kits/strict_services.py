"""Validates requests of the recipes against the published API rules of each service.

A rule is a function that returns the problems of a request, or nothing for an accepted request. Sources: Slack
"Incoming webhooks", its limits of blocks, and its escapes of mrkdwn; Microsoft "Post to a channel when a webhook
request is received" and the Adaptive Cards 1.4 schema; Opsgenie "Alert API" (create, close); ServiceNow "Event
Management, web service API"; Splunk "HTTP Event Collector, format events"; CloudEvents 1.0 and its HTTP binding,
Standard Webhooks 1.0; Alertmanager's OpenAPI of /api/v2/alerts; PagerDuty "Events API v2" (alert and change events);
OTLP/HTTP 1.x; Event Hubs "Send event" over REST; Azure Monitor "Logs Ingestion API", with the stream and the columns of
logs.bicep.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from bridge.testing.simulator.imds_api import Request

_LOGS_BICEP = Path(__file__).parents[2] / "deploy/azure/logs.bicep"
_MOST_SLACK_CHARACTERS = 40_000
_MOST_BLOCK_CHARACTERS = 3_000
_LINK = re.compile(r"<https://[^<>|\s]+\|[^<>|]+>")
#: A bare < starts a link or a mention (<!channel>), which untrusted text must not contain.
_BARE = re.compile(r"[<>]|&(?!(amp|lt|gt);)")
_MOST_TEAMS_BYTES = 28 * 1024
_OPSGENIE_FIELDS = {
    "message", "alias", "description", "responders", "visibleTo", "actions", "tags", "details", "entity", "source",
    "priority", "user", "note",
}  # fmt: skip
_SERVICENOW_FIELDS = {
    "source", "event_class", "resource", "node", "metric_name", "message_key", "type", "severity", "description",
    "additional_info", "time_of_event", "resolution_state", "ci_type",
}  # fmt: skip
_SPLUNK_KEYS = {"time", "host", "source", "sourcetype", "index", "event", "fields"}


def _json_of(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return None
    try:
        return json.loads(request.body)
    except ValueError:
        return None


def _words(**is_wrong: bool) -> str:
    return ", ".join(name for name, wrong in is_wrong.items() if wrong)


def slack(request: Request) -> str:
    """Return the problems for an incoming webhook of Slack."""
    body = _json_of(request)
    if not isinstance(body, dict):
        return "invalid_payload"
    text = body.get("text")
    attachments = body.get("attachments", [])
    blocks = [block for each in attachments for block in each.get("blocks", [])]
    texts = [block.get("text", {}).get("text", "") for block in blocks]
    return _words(
        method=request.method != "POST",
        no_service=not re.fullmatch(r"/services/T\w+/B\w+/\w+", request.path),
        no_text=not isinstance(text, str) or not text.strip(),
        text_too_long=len(text or "") > _MOST_SLACK_CHARACTERS,
        not_escaped=any(_BARE.search(_LINK.sub("", each)) for each in [text or "", *texts]),
        color=not all(re.fullmatch("#[0-9a-f]{6}", each.get("color", "#000000")) for each in attachments),
        blocks=len(blocks) > 50 or any(each.get("type") != "section" for each in blocks),
        block_text=not all(0 < len(each) <= _MOST_BLOCK_CHARACTERS for each in texts),
        unknown=not set(body) <= {"text", "blocks", "attachments", "thread_ts", "mrkdwn"},
    )


def teams(request: Request) -> str:
    """Return the problems for the Workflows webhook of Teams, and for a client that shows the card."""
    body = _json_of(request)
    if not isinstance(body, dict) or body.get("type") != "message":
        return "TriggerInputSchemaMismatch"
    attachments = body.get("attachments")
    if not isinstance(attachments, list) or len(attachments) != 1:
        return "attachments"
    card = attachments[0].get("content", {})
    blocks, actions = card.get("body", []), card.get("actions", [])
    colours = {"default", "dark", "light", "accent", "good", "warning", "attention"}
    return _words(
        size=len(request.body) > _MOST_TEAMS_BYTES,
        content_type=attachments[0].get("contentType") != "application/vnd.microsoft.card.adaptive",
        card=card.get("type") != "AdaptiveCard" or not re.fullmatch(r"1\.[0-5]", card.get("version", "")),
        body=not blocks or any(each.get("type") != "TextBlock" or not each.get("text") for each in blocks),
        colour=any(each.get("color", "default") not in colours for each in blocks),
        actions=not all(
            each["type"] == "Action.OpenUrl" and each["title"] and each["url"].startswith("https://")
            for each in actions
        ),
    )


def opsgenie(request: Request) -> str:
    """Return the problems for the Alert API of Opsgenie (create or close)."""
    body = _json_of(request)
    if not request.headers.get("authorization", "").startswith("GenieKey "):
        return "401"
    if not isinstance(body, dict):
        return "422 no JSON object"
    closing = re.fullmatch(r"/v2/alerts/([^/]+)/close", request.path)
    if closing:
        return _words(
            identifier=dict(request.query) != {"identifierType": "alias"},
            unknown=not set(body) <= {"user", "source", "note"},
        )
    return _words(
        path=request.path != "/v2/alerts",
        message=not 0 < len(body.get("message", "")) <= 130,
        alias=not 0 < len(body.get("alias", "")) <= 512,
        description=len(body.get("description", "")) > 15_000,
        priority=body.get("priority", "P3") not in {"P1", "P2", "P3", "P4", "P5"},
        unknown=not set(body) <= _OPSGENIE_FIELDS,
    )


def servicenow(request: Request) -> str:
    """Return the problems for the event collector of ServiceNow."""
    body = _json_of(request)
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme != "Basic" or b":" not in base64.b64decode(credentials, validate=True):
        return "401"
    records = body.get("records") if isinstance(body, dict) else None
    if not isinstance(records, list) or not records:
        return "no records"
    return _words(
        path=request.path != "/api/global/em/jsonv2",
        text=not all(isinstance(value, str) for each in records for value in each.values()),
        severity=any(each.get("severity") not in {"0", "1", "2", "3", "4", "5"} for each in records),
        key=any(not 0 < len(each.get("message_key", "")) <= 1_024 for each in records),
        node=any(not each.get("node") for each in records),
        additional_info=any(not _is_object(each.get("additional_info", "{}")) for each in records),
        unknown=any(not set(each) <= _SERVICENOW_FIELDS for each in records),
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def splunk(request: Request) -> str:
    """Return the problems for the HTTP Event Collector of Splunk."""
    if not re.fullmatch(r"Splunk [0-9a-f-]{36}", request.headers.get("authorization", "")):
        return "code 3: invalid authorization"
    body = _json_of(request)
    if not isinstance(body, dict):
        return "code 6: invalid data format"
    return _words(
        path=request.path != "/services/collector/event",
        code_12_event_is_required="event" not in body,
        code_13_event_is_blank=body.get("event") in ("", None),
        time=not isinstance(body.get("time", 0), int | float),
        fields=not all(isinstance(body.get(key, ""), str) for key in ("host", "source", "sourcetype", "index")),
        unknown=not set(body) <= _SPLUNK_KEYS,
    )


def cloud_events(request: Request) -> str:
    """Return the problems for a custom endpoint with CloudEvents and Standard Webhooks."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/cloudevents+json":
        return "no CloudEvent in structured mode"
    event = json.loads(request.body)
    return _words(
        method=request.method != "POST",
        specversion=event.get("specversion") != "1.0",
        required=not all(isinstance(event.get(key), str) and event[key] for key in ("id", "source", "type")),
        names=not all(re.fullmatch("[a-z0-9]{1,20}", key) for key in event),
        time=not _is_time(event.get("time")),
        data=not isinstance(event.get("data"), dict) or event.get("datacontenttype") != "application/json",
        webhook_id=request.headers.get("webhook-id") != event.get("id"),
    )


def alertmanager(request: Request) -> str:
    """Return the problems for Alertmanager."""
    alerts = _json_of(request)
    if not isinstance(alerts, list) or not alerts:
        return "no alerts"
    labels = [each.get("labels", {}) for each in alerts]
    return _words(
        path=request.path != "/api/v2/alerts",
        unknown=any(
            not set(each) <= {"labels", "annotations", "startsAt", "endsAt", "generatorURL"} for each in alerts
        ),
        label=not all(re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) for each in labels for name in each),
        text=not all(isinstance(value, str) and value for each in labels for value in each.values()),
        name=not all(each.get("alertname") for each in labels),
        time=not all(_is_time(each[key]) for each in alerts for key in ("startsAt", "endsAt") if key in each),
    )


def pagerduty(request: Request) -> str:
    """Return the problems for PagerDuty (alert event or change event)."""
    body = _json_of(request)
    if not isinstance(body, dict) or request.path not in ("/v2/enqueue", "/v2/change/enqueue"):
        return "invalid event"
    payload = body.get("payload", {})
    is_change, is_resolved = "change" in request.path, body.get("event_action") == "resolve"
    return _words(
        routing_key=not re.fullmatch("[0-9a-zA-Z]{32}", body.get("routing_key", "")),
        action=not is_change and body.get("event_action") not in ("trigger", "acknowledge", "resolve"),
        dedup_key=not is_change and not 0 < len(body.get("dedup_key", "")) <= 255,
        summary=not is_resolved and not 0 < len(payload.get("summary", "")) <= 1_024,
        source=not is_resolved and not payload.get("source"),
        severity=not (is_change or is_resolved)
        and payload.get("severity") not in ("critical", "error", "warning", "info"),
        time="timestamp" in payload and not _is_time(payload["timestamp"]),
    )


def otlp(request: Request) -> str:
    """Return the problems for a receiver of OTLP over HTTP."""
    try:
        logs = ExportLogsServiceRequest.FromString(request.body)
    except DecodeError:
        return "no ExportLogsServiceRequest"
    records = [
        record for resource in logs.resource_logs for scope in resource.scope_logs for record in scope.log_records
    ]
    return _words(
        path=request.path != "/v1/logs",
        content_type=request.headers.get("content-type") != "application/x-protobuf",
        none=not records,
        time=not all(record.observed_time_unix_nano for record in records),
        attributes=any(len({pair.key for pair in each.attributes}) != len(each.attributes) for each in records),
    )


def log_analytics(request: Request) -> str:
    """Return the problems for the data collection rule of logs.bicep, with a managed identity."""
    bicep = _LOGS_BICEP.read_text(encoding="utf-8")
    stream = re.findall(r"^var stream = '(.+)'$", bicep, re.MULTILINE)[0]
    columns = set(re.findall(r"name: '(\w+)'\n +type: 'string'", bicep))
    rows = _json_of(request)
    if not isinstance(rows, list) or not rows:
        return "no array of rows"
    return _words(
        method=request.method != "POST",
        path=not re.fullmatch(rf"/dataCollectionRules/dcr-\w+/streams/{stream}", request.path),
        api_version=dict(request.query) != {"api-version": "2023-01-01"},
        audience=_claims_of(request).get("aud") != "https://monitor.azure.com/",
        columns=any(set(row) != columns or not all(isinstance(each, str) for each in row.values()) for row in rows),
        field_is_cut=any(len(each.encode()) > 64 * 1024 for row in rows for each in row.values()),
        size=len(request.body) > 1024 * 1024,
    )


def event_hub(request: Request) -> str:
    """Return the problems for the event hub of the recipe, with a managed identity."""
    claims = _claims_of(request)
    broker = json.loads(request.headers.get("brokerproperties", "{}"))
    return _words(
        method=request.method != "POST",
        path=request.path != "/scheduled-events/messages",
        api_version="api-version" not in dict(request.query),
        audience=claims.get("aud") not in ("https://eventhubs.azure.net", "https://eventhubs.azure.net/"),
        properties=not set(broker) <= {"PartitionKey"} or not isinstance(broker.get("PartitionKey", ""), str),
        size=len(request.body) > 1024 * 1024,
    )


def _claims_of(request: Request) -> Any:
    payload = request.headers.get("authorization", "").removeprefix("Bearer ").split(".")
    return json.loads(base64.urlsafe_b64decode(payload[1] + "=" * (-len(payload[1]) % 4))) if len(payload) > 1 else {}


def _is_time(text: Any) -> bool:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).tzinfo is not None
    except ValueError:
        return False


#: Service -> its rule, its response to accepted requests, and its path if the recipe keeps the URL in a file.
SERVICES: dict[str, tuple[Callable[[Request], str], int, str]] = {
    "webhook:slack": (slack, 200, "/services/T0/B0/x1"),
    "webhook:teams": (teams, 202, "/workflows/1"),
    "webhook:opsgenie": (opsgenie, 202, ""),
    "webhook:servicenow": (servicenow, 200, ""),
    "webhook:splunk": (splunk, 200, ""),
    "webhook": (cloud_events, 204, ""),
    "webhook:alertmanager": (alertmanager, 200, ""),
    "webhook:pagerduty": (pagerduty, 202, ""),
    "otlp": (otlp, 200, ""),
    "eventhubs": (event_hub, 201, ""),
    "webhook:log-analytics": (log_analytics, 204, ""),
}
