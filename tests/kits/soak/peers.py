"""The other ends of an agent in a soak: a metadata service with another document for each poll, and the sinks' peers.

Documents are a function of their number, so which records must exist is known without asking the agent. Each document
after the first few holds exactly one change, and about fifteen events. Peers keep ids only: in half an hour a hundred
thousand requests come.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from bridge.testing.simulator.http_server import Connection, HttpServer
from bridge.testing.simulator.imds_api import Answer, Request

#: An event comes with each third document; later ones show it started or moved, and then gone: one change a document.
_BIRTHS_APART = 3
_CHANGE_AFTER, _GONE_AFTER = 22, 44
_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt")
_SAID = re.compile(r"Z (\w+)(?: \(\w+\))?: .*\. soak (\d+)")

Life = tuple[int, str]
"""An event's number, and one transition of it."""


class Documents:
    """A virtual machine's documents, by number."""

    def __init__(self) -> None:
        now = datetime.now(timezone.utc) + timedelta(days=2)
        self._not_before = [format_datetime(now + timedelta(minutes=late), usegmt=True) for late in (0, 1)]

    def body(self, number: int) -> bytes:
        """Return document *number*; the first is 0 and empty."""
        last = (number - 1) // _BIRTHS_APART
        first = max(0, (number - 1 - _GONE_AFTER) // _BIRTHS_APART + 1)
        events = [self._event(each, age=number - 1 - each * _BIRTHS_APART) for each in range(first, last + 1)]
        return json.dumps({"DocumentIncarnation": number + 1, "Events": events}).encode()

    def _event(self, event: int, *, age: int) -> dict[str, object]:
        is_late = age >= _CHANGE_AFTER
        is_started = is_late and not _is_canceled(event)
        return {
            "EventId": event_id(event),
            "EventStatus": "Started" if is_started else "Scheduled",
            "EventType": _TYPES[event % len(_TYPES)],
            "ResourceType": "VirtualMachine",
            "Resources": ["soak-vm", "soak-vm_1"][: 1 + event % 2],
            "NotBefore": "" if is_started else self._not_before[is_late],
            "Description": f"soak {event}",
            "EventSource": "Platform",
            "DurationInSeconds": 5,
        }


def event_id(event: int) -> str:
    """Return the EventId of event number *event*."""
    return f"50AC0000-1111-4222-8333-{event:012X}"


def _is_canceled(event: int) -> bool:
    return event % 5 == 0


def expected(last: int) -> Iterator[Life]:
    """Yield what an agent must have recorded once it has seen every document up to number *last*."""
    for event in range((last - 1) // _BIRTHS_APART + 1):
        age = last - 1 - event * _BIRTHS_APART
        yield event, "scheduled"
        if age >= _CHANGE_AFTER:
            yield event, "updated" if _is_canceled(event) else "started"
        if age >= _GONE_AFTER:
            yield event, "ended" if _is_canceled(event) else "completed"  # others have its type and Resources


class Azure:
    """A metadata service that goes on to the next document at each poll, until number *last*.

    From number *burn_in* on it holds each answer back, so that there are *a_second* of them.
    """

    def __init__(self, last: int, *, burn_in: int = 0, a_second: float | None = None) -> None:
        self._documents = Documents()
        self._last = last
        self._burn_in = burn_in
        self._pace = 0.0 if a_second is None else 1.0 / a_second
        self._next_at = 0.0
        self.burnt_in_at = time.monotonic()
        """When that number was shown, in monotonic seconds."""
        self.shown = -1
        self.is_seen = threading.Event()
        """Set once the agent has asked again after the last document."""
        self._server = HttpServer(("127.0.0.1", 0), self._respond, threading.Event())
        self._server.start()
        self.endpoint = self._server.endpoint

    def _respond(self, connection: Connection, request: Request) -> None:
        if request.path.endswith("/scheduledevents"):
            if self.shown == self._last:
                self.is_seen.set()
            if self.shown < self._burn_in:
                self.burnt_in_at = self._next_at = time.monotonic()
            else:
                self._next_at = max(self._next_at + self._pace, time.monotonic())
                time.sleep(max(self._next_at - time.monotonic(), 0.0))
            self.shown = min(self.shown + 1, self._last)
            body = self._documents.body(self.shown)
        else:
            body = b'{"name": "soak-vm", "vmId": "50ac0000-aaaa-4bbb-8ccc-000000000001", "location": "westeurope"}'
        connection.write(Answer(body=body))

    def close(self) -> None:
        """End it."""
        self._server.close()


class HttpPeer:
    """Accepts what is posted, and keeps the *names* that it finds there."""

    def __init__(self, names: Callable[[bytes], Iterable[str]], *, tls: ssl.SSLContext | None = None) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._server = HttpServer(("127.0.0.1", 0), self._respond, threading.Event())
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._server.start()
        self.authority = self._server.endpoint.partition("//")[2]

    def _respond(self, connection: Connection, request: Request) -> None:
        names = list(self._names(request.body))
        with self._lock:
            self._seen.update(names)
        connection.write(Answer(status=201, content_type="application/x-protobuf"))

    def seen(self) -> Counter[str]:
        """Return how often each name came."""
        with self._lock:
            return self._seen.copy()

    def close(self) -> None:
        """End it."""
        self._server.close()


def ids_of_cloud_event(body: bytes) -> list[str]:
    """Return the id of the one record in a CloudEvent."""
    return [json.loads(body)["id"]]


def ids_of_otlp(body: bytes) -> list[str]:
    """Return the ids of the records in a request of OTLP."""
    return [
        attribute.value.string_value
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
        for attribute in record.attributes
        if attribute.key == "log.record.uid"
    ]


def lives_of_apprise(body: bytes) -> list[str]:
    """Return which change of which event a message tells: a sentence holds no id."""
    found = _SAID.search(json.loads(body)["message"])
    return ["?" if found is None else name_of((int(found[2]), found[1]))]


def name_of(life: Life) -> str:
    """Return *life* as one word."""
    return f"{life[0]} {life[1]}"


def lines_of(path: Path) -> Counter[str]:
    """Return how often each line stands in the file at *path*."""
    return Counter(path.read_text(encoding="ascii").split()) if path.exists() else Counter()
