"""Sends requests to the Azure Instance Metadata Service (IMDS).

The client requests the Scheduled Events document and this VM's identity, and sends approvals. Each request has the
``Metadata: true`` header. The client never uses a proxy, because a proxy can add an X-Forwarded-For header, and IMDS
rejects requests with this header. It does not follow redirects, because IMDS does not send any.

The first request for the document turns on Scheduled Events for this VM, which can take two minutes. If the VM sends no
requests for 24 hours, Azure turns Scheduled Events off again (Microsoft, "Scheduled Events for Linux VMs in Azure").

If a response has the same body as the last good response, the client skips parsing and returns the same Document.

With the api-version ``auto``, the client requests `PREVIEW_VERSION`, which IMDS might not support. After two refusals
in a row and a good response to `STABLE_VERSION`, the client uses `STABLE_VERSION`. Once a day, the client tries
`PREVIEW_VERSION` again.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from bridge.config.settings import ImdsSettings
from bridge.errors import DeadlineExceeded, DocumentInvalid, ImdsError, ImdsStatus, ImdsUnreachable
from bridge.events.event import SERVICE_OFF_AFTER_SECONDS, Document, VmIdentity
from bridge.http.connection import DeadlineConnection, HttpResponse
from bridge.http.retry_after import retry_after_seconds
from bridge.imds.document import MAX_DOCUMENT_BYTES, parse_attested, parse_document, parse_identity
from bridge.sink import AttestedTokens
from bridge.system.access_tokens import RenewedToken
from bridge.text import excerpt

if TYPE_CHECKING:
    import requests

logger = logging.getLogger(__name__)

_IDENTITY_PATH = "/metadata/instance/compute?api-version=2021-02-01&format=json"
_ATTESTED_PATH = "/metadata/attested/document"
_ATTESTED_QUERY = "?api-version=2020-09-01&nonce="
_HEADERS = {"Metadata": "true"}
_OK = 200
#: The first version with SpotRebalanceRecommendation. It was not generally available in June 2026.
PREVIEW_VERSION = "2024-07-09"
STABLE_VERSION = "2020-07-01"
#: IMDS responds with one of these statuses if it does not support an api-version.
_REFUSALS = frozenset({400, 404})
_RETRY_VERSION_SECONDS = 86_400.0
#: The limit for the daily attempt. A longer attempt could delay the poll until the delay counts as a gap.
_ATTEMPT_SECONDS = 2.0
_LEAST_SECONDS = 0.1
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class ImdsClient:
    """Sends requests to the metadata service of this VM. *clock* returns Unix time.

    Different threads can call `scheduled_events`, `identity`, and `start_requests` at the same time, because each of
    these methods has its own connection. `scheduled_events_again` shares the connection of `start_requests`, so call
    these two methods from the same thread.
    """

    def __init__(self, settings: ImdsSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self.endpoint = settings.endpoint.rstrip("/")
        self._is_auto = settings.api_version == "auto"
        self.api_version = PREVIEW_VERSION if self._is_auto else settings.api_version
        """The version of the last poll. With ``auto``, `scheduled_events` changes it."""
        self._refused_at = -math.inf
        self._clock = clock
        self._poll_connection = self._connection()
        self._identity_connection = self._connection()
        self._approval_connection = self._connection()
        self.answered_at: float | None = None
        """Unix time of the last response with status 200. Set it if an earlier client received such a response."""
        self.date: str | None = None
        """The Date header of the last response to `scheduled_events`."""
        self._last: tuple[bytes, Document] | None = None

    @property
    def deadline_seconds(self) -> float:
        """Return the deadline of the next call of `scheduled_events`."""
        is_on = self.answered_at is not None and self._clock() - self.answered_at < SERVICE_OFF_AFTER_SECONDS
        seconds = self._settings.timeout_seconds
        return seconds if is_on else max(seconds, self._settings.first_timeout_seconds)

    def scheduled_events(self) -> Document:
        """Return the Scheduled Events document, or the same object while its bytes are unchanged.

        Raises ImdsUnreachable if IMDS does not respond, ImdsStatus if the status is not 200, and DocumentInvalid if the
        body is not a document. The current events are then unknown, so never treat an error as an empty document.
        """
        is_preview_due = not 0 <= self._clock() - self._refused_at < _RETRY_VERSION_SECONDS
        if self._is_auto and is_preview_due:
            return self._negotiated()
        return self._poll(self.api_version, self.deadline_seconds)

    def _negotiated(self) -> Document:
        """Return the document under the newest version that IMDS supports."""
        is_daily_attempt = self.api_version == STABLE_VERSION
        end = time.monotonic() + self.deadline_seconds
        for _ in range(1 if is_daily_attempt else 2):
            seconds = max(end - time.monotonic(), _LEAST_SECONDS)
            try:
                document = self._poll(PREVIEW_VERSION, min(seconds, _ATTEMPT_SECONDS) if is_daily_attempt else seconds)
            except ImdsError as error:
                if not (is_daily_attempt or error.status in _REFUSALS):
                    raise
            else:
                self._refused_at = -math.inf
                break
        else:
            if is_daily_attempt:
                self._refused_at = self._clock()
            document = self._poll(STABLE_VERSION, max(end - time.monotonic(), _LEAST_SECONDS))
            self._refused_at = self._clock()
        if self.api_version != document.api_version:
            logger.info("The api-version of Scheduled Events is now %s.", document.api_version)
            self.api_version = document.api_version
        return document

    def _poll(self, version: str, deadline_seconds: float) -> Document:
        response = self._send(self._poll_connection, "GET", _events_path(version), deadline_seconds=deadline_seconds)
        self.answered_at, self.date = self._clock(), response.headers.get("Date")
        document = self._parsed(response.content, version)
        self._last = (response.content, document)
        return document

    def _parsed(self, content: bytes, version: str) -> Document:
        last = self._last
        if last is not None and content == last[0] and last[1].api_version == version:
            return last[1]
        return parse_document(content, api_version=version)

    def scheduled_events_again(self) -> Document:
        """Return the current document, requested over the connection of `start_requests`.

        The request uses the api-version of the last poll. If the body has not changed since that poll, the method
        returns the same Document object. Raises the same errors as `scheduled_events`.
        """
        version = self.api_version
        return self._parsed(self._send(self._approval_connection, "GET", _events_path(version)).content, version)

    def identity(self) -> VmIdentity:
        """Return the identity of this VM. Raises the same errors as `scheduled_events`."""
        return parse_identity(self._send(self._identity_connection, "GET", _IDENTITY_PATH).content)

    def attested_document(self, nonce: str) -> str:
        """Return the document in which Azure signs this VM's identity and *nonce*, in base64.

        IMDS can return the document of an earlier request, which contains the nonce of that request. The method raises
        the same errors as `scheduled_events`, but the messages never contain the nonce. Any thread can call this
        method.
        """
        path = _ATTESTED_PATH + _ATTESTED_QUERY + quote(nonce, safe="")
        with closing(self._connection()) as connection:
            return parse_attested(self._send(connection, "GET", path, shown=_ATTESTED_PATH).content)

    def start_requests(self, event_ids: Sequence[str], *, document: Document) -> int:
        """Approve the events in *event_ids* with one request. Return the status code (200).

        The request uses the api-version of *document*, the document that shows the events as Scheduled. The 2017 API
        versions also require its incarnation. Raises ImdsStatus for any status other than 200. If this method raises
        ImdsUnreachable, Azure might still have received the approval.
        """
        if not event_ids:
            raise ValueError("start_requests needs at least one EventId.")
        wanted: dict[str, object] = {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        if document.api_version.startswith("2017") and document.incarnation is not None:
            wanted["DocumentIncarnation"] = document.incarnation
        body, path = json.dumps(wanted).encode(), _events_path(document.api_version)
        return self._send(self._approval_connection, "POST", path, body=body).status_code

    def close(self) -> None:
        """Close all connections, and abort other threads' requests. A second call has no effect."""
        for connection in (self._poll_connection, self._identity_connection, self._approval_connection):
            connection.close()

    def _connection(self) -> DeadlineConnection:
        parts = urlsplit(self.endpoint)
        return DeadlineConnection(parts.hostname or "", parts.port or http.client.HTTP_PORT)

    def _send(
        self,
        connection: DeadlineConnection,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        shown: str | None = None,
        deadline_seconds: float | None = None,
    ) -> HttpResponse:
        """Return a response with status 200. Otherwise, raise ImdsError with *shown* as the path."""
        shown = shown or path
        try:
            response = connection.request(
                method,
                path,
                body=body,
                headers=_HEADERS if body is None else {**_HEADERS, "Content-Type": "application/json"},
                deadline_seconds=deadline_seconds or self._settings.timeout_seconds,
                max_body_bytes=MAX_DOCUMENT_BYTES,
            )
        except (DeadlineExceeded, OSError, http.client.HTTPException) as exc:
            reason = (str(exc) or type(exc).__name__).rstrip(".")
            raise ImdsUnreachable(
                f"The metadata service at {self.endpoint} did not respond to {method} {shown}: {reason}. "
                "The agent tries again."
            ) from exc
        where = f"{method} {self.endpoint}{shown}"
        if response.status_code != _OK:
            raise ImdsStatus(
                f"{where}: {self._complaint(response)}",
                status=response.status_code,
                retry_after_seconds=retry_after_seconds(response.headers),
            )
        if response.unread is not None and method == "GET":
            raise DocumentInvalid(f"{where}: {response.unread} Check that imds.endpoint is the metadata service.")
        return response

    def _complaint(self, response: HttpResponse) -> str:
        status = f"{response.status_code} {response.reason}"
        if response.status_code in _REDIRECTS:
            return f"{status}, a redirect. The metadata service sends no redirects. Check imds.endpoint."
        body = excerpt(response.content)
        return f"{status}: {body}" if body else f"{status}, with an empty body."


def _events_path(api_version: str) -> str:
    return f"/metadata/scheduledevents?api-version={quote(api_version, safe='')}"


def attested_document(settings: ImdsSettings, nonce: str) -> str:
    """Return the attested document of this VM with *nonce* (`ImdsClient.attested_document`)."""
    with closing(ImdsClient(settings)) as imds:
        return imds.attested_document(nonce)


def attested_tokens(document: Callable[[str], str]) -> AttestedTokens:
    """Return a source of portal tokens for sinks. *document* returns the attested document."""

    def make(post: Callable[[str, bytes], requests.Response], *, portal: str) -> RenewedToken:
        from bridge.system.access_tokens import AttestedToken  # noqa: PLC0415  # only this credential needs it

        return AttestedToken(post, document, portal=portal)

    return make
