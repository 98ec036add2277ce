"""ImdsClient: requests the Scheduled Events document and the identity of this VM, and sends approvals.

Every request has the header ``Metadata: true``. The service refuses a request with X-Forwarded-For, so the client never
uses a proxy and never follows a redirect. The first request turns the feature on and may take two minutes. After 24
hours without a request, the feature is off again (Microsoft, "Scheduled Events for Linux VMs in Azure").

A response with the same bytes as the last good response
returns the same Document without parsing.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from bridge.config.settings import ImdsSettings
from bridge.errors import DeadlineExceeded, DocumentInvalid, ImdsStatus, ImdsUnreachable
from bridge.events.event import SERVICE_OFF_AFTER_SECONDS, Document, Incarnation, VmIdentity
from bridge.http.connection import DeadlineConnection, HttpResponse
from bridge.http.retry_after import retry_after_seconds
from bridge.imds.document import MAX_DOCUMENT_BYTES, parse_attested, parse_document, parse_identity
from bridge.sink import AttestedTokens
from bridge.system.access_tokens import RenewedToken
from bridge.text import EXCERPT_CHARACTERS, excerpt, one_line

if TYPE_CHECKING:
    import requests

_IDENTITY_PATH = "/metadata/instance/compute?api-version=2021-02-01&format=json"
_ATTESTED_PATH = "/metadata/attested/document"
_ATTESTED_QUERY = "?api-version=2020-09-01&nonce="
_HEADERS = {"Metadata": "true"}
_OK = 200
_BAD_REQUEST = 400
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class ImdsClient:
    """The metadata service of this VM.

    Three threads can call `scheduled_events`, `identity`, and `start_requests` at the same time. Call
    `scheduled_events_again` only from the thread that calls `start_requests`. *endpoint* is a URL such as
    ``http://169.254.169.254``. If the last response with status 200 is missing or over a day old,
    *first_timeout_seconds* is the deadline of `scheduled_events`. *timeout_seconds* is the deadline of all other
    requests. *clock* returns Unix time.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        api_version: str,
        timeout_seconds: float,
        first_timeout_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.api_version = api_version
        self._timeout_seconds = timeout_seconds
        self._first_timeout_seconds = first_timeout_seconds
        self._clock = clock
        self._poll_connection = self._connection()
        self._identity_connection = self._connection()
        self._approval_connection = self._connection()
        self._events_path = f"/metadata/scheduledevents?api-version={quote(api_version, safe='')}"
        self._answered_at: float | None = None
        self._last: tuple[bytes, Document] | None = None

    @property
    def deadline_seconds(self) -> float:
        """Return the deadline of the next `scheduled_events`."""
        is_on = self._answered_at is not None and self._clock() - self._answered_at < SERVICE_OFF_AFTER_SECONDS
        return self._timeout_seconds if is_on else max(self._timeout_seconds, self._first_timeout_seconds)

    def go_on_from(self, before: ImdsClient) -> None:
        """Continue from *before*, a client of the same service: the feature is already on."""
        self._answered_at = before._answered_at

    def scheduled_events(self) -> Document:
        """Return the Scheduled Events document. While its bytes do not change, return the same object.

        Raises ImdsUnreachable, ImdsStatus if the status is not 200, and DocumentInvalid if the body is not a document.
        After each of these errors, the state is unknown. It never means that there are no events.
        """
        response = self._send(self._poll_connection, "GET", self._events_path, deadline_seconds=self.deadline_seconds)
        self._answered_at = self._clock()
        last = self._last
        if last is None or response.content != last[0]:
            last = self._last = (response.content, parse_document(response.content))
        return last[1]

    def scheduled_events_again(self) -> Document:
        """Return the current document over the connection of `start_requests`; raise the same errors.

        If the bytes equal those of the last poll, return the object that `scheduled_events` returned.
        """
        response = self._send(self._approval_connection, "GET", self._events_path)
        last = self._last
        return last[1] if last is not None and response.content == last[0] else parse_document(response.content)

    def identity(self) -> VmIdentity:
        """Return the identity of this VM. Raises the same errors as a poll."""
        return parse_identity(self._send(self._identity_connection, "GET", _IDENTITY_PATH).content)

    def attested_document(self, nonce: str) -> str:
        """Return the signed document with the identity of this VM and *nonce*, in base64.

        The service may return an earlier document with another nonce. Any thread can call this method. It raises the
        same errors as a poll, with the same message for every nonce.
        """
        path = _ATTESTED_PATH + _ATTESTED_QUERY + quote(nonce, safe="")
        with closing(self._connection()) as connection:
            return parse_attested(self._send(connection, "GET", path, shown=_ATTESTED_PATH).content)

    def start_requests(self, event_ids: Sequence[str], *, incarnation: Incarnation) -> int:
        """Approve the events *event_ids* with one request, and return the status, which is 200.

        The 2017 versions also require the *incarnation* of the document. After ImdsUnreachable, it is unknown whether
        the service received the approval. Raises ImdsStatus for any other status.
        """
        if not event_ids:
            raise ValueError("start_requests needs at least one EventId.")
        wanted: dict[str, object] = {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        if self.api_version.startswith("2017") and incarnation is not None:
            wanted["DocumentIncarnation"] = incarnation
        body = json.dumps(wanted).encode()
        return self._send(self._approval_connection, "POST", self._events_path, body=body).status_code

    def close(self) -> None:
        """Close every connection and end the calls of other threads. A second call has no effect."""
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
        """Return the response if its status is 200; raise ImdsError otherwise.

        *shown* replaces the path in messages, so that the message does not contain a nonce.
        """
        shown = shown or path
        try:
            response = connection.request(
                method,
                path,
                body=body,
                headers=_HEADERS if body is None else {**_HEADERS, "Content-Type": "application/json"},
                deadline_seconds=deadline_seconds or self._timeout_seconds,
                max_body_bytes=MAX_DOCUMENT_BYTES,
            )
        except (DeadlineExceeded, OSError, http.client.HTTPException) as exc:
            reason = (str(exc) or type(exc).__name__).rstrip(".")
            raise ImdsUnreachable(
                f"The metadata service at {self.endpoint} gave no answer to {method} {shown}: {reason}. "
                "It is asked again."
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
        """Return the error in *response* as a sentence."""
        status = f"{response.status_code} {response.reason}".strip()
        if response.status_code in _REDIRECTS:
            return f"{status}, a redirect. The metadata service sends no redirects. Check imds.endpoint."
        versions = _newest_versions(response) if response.status_code == _BAD_REQUEST else ""
        if versions:
            return (
                f"{status}. The service does not support api-version {self.api_version!r}. Its newest versions are "
                f"{versions}. Set imds.api_version to a supported version, such as 2020-07-01."
            )
        body = excerpt(response.content)
        return f"{status}: {body}" if body else f"{status}, with an empty body."


def client_of(settings: ImdsSettings, *, at_most_seconds: float | None = None) -> ImdsClient:
    """Return a client for *settings*. *at_most_seconds* limits every request, also the first."""
    within = settings.timeout_seconds if at_most_seconds is None else min(settings.timeout_seconds, at_most_seconds)
    return ImdsClient(
        endpoint=settings.endpoint,
        api_version=settings.api_version,
        timeout_seconds=within,
        first_timeout_seconds=settings.first_timeout_seconds if at_most_seconds is None else within,
    )


def attested_document(settings: ImdsSettings, nonce: str) -> str:
    """Return the attested document of this VM with *nonce*, see `ImdsClient.attested_document`."""
    with closing(client_of(settings, at_most_seconds=settings.timeout_seconds)) as imds:
        return imds.attested_document(nonce)


def attested_tokens(document: Callable[[str], str]) -> AttestedTokens:
    """Return the function by which sinks get a portal's token. *document* returns the attested document."""

    def make(post: Callable[[str, bytes], requests.Response], *, portal: str) -> RenewedToken:
        from bridge.system.access_tokens import AttestedToken  # noqa: PLC0415  # only this credential needs it

        return AttestedToken(post, document, portal=portal)

    return make


def _newest_versions(response: HttpResponse) -> str:
    """Return the versions that a 400 lists, separated by commas; "" if the response lists no versions."""
    try:
        answer = json.loads(response.content)
    except (ValueError, RecursionError):
        return ""
    versions = answer.get("newest-versions") if isinstance(answer, dict) else None
    named = [version for version in versions if isinstance(version, str)] if isinstance(versions, list) else []
    return one_line(", ".join(named[:10]), EXCERPT_CHARACTERS)
