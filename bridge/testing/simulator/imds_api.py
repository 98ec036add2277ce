"""Computes the responses of the Instance Metadata Service. This module uses no sockets.

The paths, headers, and statuses are from Microsoft's pages "Azure Instance Metadata Service", "Scheduled Events for
Linux VMs", and "How to use managed identities ... to acquire an access token". These pages do not list all error
messages, so some error messages of the simulator differ from the error messages of Azure.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.config.settings import API_VERSIONS
from bridge.testing.simulator.errors import UnknownEvent
from bridge.testing.simulator.events import HEADER_SINCE, PLAIN_APPROVAL_SINCE
from bridge.testing.simulator.machines import Machine
from bridge.testing.simulator.world import World

EVENTS_PATH = "/metadata/scheduledevents"
INSTANCE_PATH = "/metadata/instance"
ATTESTED_PATH = "/metadata/attested/document"
TOKEN_PATH = "/metadata/identity/oauth2/token"  # noqa: S105 - a path

_INSTANCE_VERSIONS = (
    *("2017-03-01", "2017-04-02", "2017-08-01", "2017-10-01", "2017-12-01", "2018-02-01", "2018-04-02", "2018-10-01"),
    *("2019-02-01", "2019-03-11", "2019-04-30", "2019-06-01", "2019-06-04", "2019-08-01", "2019-08-15", "2019-11-01"),
    *("2020-06-01", "2020-07-15", "2020-09-01", "2020-10-01", "2020-12-01", "2021-01-01", "2021-02-01", "2021-03-01"),
    *("2021-05-01", "2021-10-01", "2021-11-01", "2021-11-15", "2021-12-13", "2023-07-01", "2023-11-15"),
)
_MOST_NONCE_CHARACTERS = 32
_TOKEN_VERSION = "2018-02-01"  # noqa: S105 - a version
_REQUESTS_A_SECOND = 5


@dataclass(frozen=True, kw_only=True)
class Request:
    """One HTTP request. The names of the headers are in lower case."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One HTTP response. *headers* contains only the additional headers of this response."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


class RateLimit:
    """Limits one VM to five requests per second, as Azure does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: deque[float] = deque(maxlen=_REQUESTS_A_SECOND)

    def admits(self, now_seconds: float) -> bool:
        """Return whether a request at *now_seconds* is allowed, and count it if so."""
        with self._lock:
            if len(self._taken) == _REQUESTS_A_SECOND and now_seconds - self._taken[0] < 1.0:
                return False
            self._taken.append(now_seconds)
            return True


#: Returns the attested document of a machine in base64. The arguments are the machine, a nonce, and a fault.
DocumentMaker = Callable[[Machine, str, "str | None"], str]


class ImdsApi:
    """The metadata service of one VM."""

    def __init__(self, world: World, machine: Machine, *, document: DocumentMaker) -> None:
        """Create the metadata service of *machine*. *document* returns its attested documents."""
        self._world = world
        self._machine = machine
        self._document = document

    def answer(self, request: Request, *, document_kind: str | None = None) -> Answer:
        """Return the response to *request*. *document_kind* is a fault for an attested document."""
        target = target_of(request.path)
        if "x-forwarded-for" in request.headers:
            return error(400, "Bad request. A request with an X-Forwarded-For header is refused.")
        if target == "other":
            return error(404, "Not found.")
        return self._events(request) if target == "scheduledevents" else self._read(request, target, document_kind)

    def _read(self, request: Request, target: str, document_kind: str | None) -> Answer:
        if not _has_metadata_header(request):
            return _no_metadata_header()
        if request.method != "GET":
            return error(405, f"Method {request.method} is not allowed.")
        if target == "token":
            return self._token(request)
        return self._attested(request, document_kind) if target == "attested" else self._instance(request)

    def _events(self, request: Request) -> Answer:
        version = request.query.get("api-version", "")
        if version not in API_VERSIONS:
            return _wrong_version(API_VERSIONS)
        if version >= HEADER_SINCE and not _has_metadata_header(request):
            return _no_metadata_header()
        if request.method == "GET":
            return Answer(body=self._world.document(version))
        if request.method == "POST":
            return self._start(request, version)
        return error(405, f"Method {request.method} is not allowed.")

    def _start(self, request: Request, version: str) -> Answer:
        try:
            event_ids = _start_requests(request.body, needs_incarnation=version < PLAIN_APPROVAL_SINCE)
            self._world.approve(event_ids, vm=self._machine.name)
        except (ValueError, UnknownEvent) as exc:
            return error(400, f"Bad request. {exc}")
        return Answer()

    def _instance(self, request: Request) -> Answer:
        if request.query.get("api-version") not in _INSTANCE_VERSIONS:
            return _wrong_version(_INSTANCE_VERSIONS)
        part = request.path[len(INSTANCE_PATH) :].strip("/")
        value: Any = self._machine.instance().get(part) if part else self._machine.instance()
        return error(404, "Not found.") if value is None else Answer(body=json.dumps(value).encode())

    def _attested(self, request: Request, kind: str | None) -> Answer:
        if request.query.get("api-version", "") not in _INSTANCE_VERSIONS[_INSTANCE_VERSIONS.index("2018-10-01") :]:
            return _wrong_version(_INSTANCE_VERSIONS)
        nonce = request.query.get("nonce", "")
        if len(nonce) > _MOST_NONCE_CHARACTERS:
            return error(400, f"Bad request. nonce has more than {_MOST_NONCE_CHARACTERS} characters.")
        signature = self._document(self._machine, nonce, kind)
        return Answer(body=json.dumps({"encoding": "pkcs7", "signature": signature}).encode())

    def _token(self, request: Request) -> Answer:
        if request.query.get("api-version") != _TOKEN_VERSION:
            return error(400, "invalid_request", error_description=f"api-version must be {_TOKEN_VERSION}")
        resource = request.query.get("resource", "")
        if not resource:
            return error(400, "invalid_request", error_description="Required query variable 'resource' is missing")
        client_id = request.query.get("client_id", "")
        token = self._machine.token(resource, client_id=client_id, now=self._world.clock.now())
        return Answer(body=json.dumps(token).encode())


def target_of(path: str) -> str:
    """Return the fault target of *path*, or "other" outside the metadata service."""
    path = path.rstrip("/").lower()
    if path == EVENTS_PATH:
        return "scheduledevents"
    if path == TOKEN_PATH:
        return "token"
    if path == ATTESTED_PATH:
        return "attested"
    return "identity" if path == INSTANCE_PATH or path.startswith(INSTANCE_PATH + "/") else "other"


def error(status: int, message: str, **more: object) -> Answer:
    """Return an error response in the format of the metadata service."""
    return Answer(status=status, body=json.dumps({"error": message, **more}).encode())


def too_many_requests() -> Answer:
    """Return the response to a request above the limit."""
    return error(429, "Too many requests. The service takes 5 requests per second from a virtual machine.")


def _has_metadata_header(request: Request) -> bool:
    return request.headers.get("metadata", "").lower() == "true"


def _no_metadata_header() -> Answer:
    return error(400, "Bad request. Required metadata header not specified.")


def _wrong_version(versions: tuple[str, ...]) -> Answer:
    message = "Bad request. api-version is invalid or was not specified in the request."
    return error(400, message, **{"newest-versions": list(reversed(versions[-3:]))})


def _start_requests(body: bytes, *, needs_incarnation: bool) -> list[str]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise ValueError("The body is not valid JSON.") from exc
    requests = value.get("StartRequests") if isinstance(value, dict) else None
    if not isinstance(requests, list) or not requests:
        raise ValueError("The body must have a StartRequests list with at least one entry.")
    if needs_incarnation and not isinstance(value.get("DocumentIncarnation"), int):
        raise ValueError("This api-version requires DocumentIncarnation, a number, in the body.")
    event_ids = [item.get("EventId") if isinstance(item, dict) else None for item in requests]
    if not all(isinstance(event_id, str) and event_id for event_id in event_ids):
        raise ValueError('Each entry of StartRequests must be {"EventId": "..."}.')
    return [str(event_id) for event_id in event_ids]
