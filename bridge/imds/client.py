"""ImdsClient: requests the Scheduled Events document and the identity of this VM, and sends approvals.

Every request has the header ``Metadata: true``. The service refuses a request with X-Forwarded-For, so the client never
uses a proxy and never follows a redirect. The first request turns the feature on and may take two minutes. After 24
hours without a request, the feature is off again (Microsoft, "Scheduled Events for Linux VMs in Azure").

The agent polls all day, so the request is prepared once. A response with the same bytes as the last good response
returns the same Document without parsing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from urllib.parse import quote

import requests

from bridge.config.settings import ImdsSettings
from bridge.errors import ConfigurationError, DeadlineExceeded, DocumentInvalid, ImdsStatus, ImdsUnreachable
from bridge.events.event import SERVICE_OFF_AFTER_SECONDS, Document, Incarnation, VmIdentity
from bridge.http.failures import root_cause
from bridge.http.session import DeadlineSession, ResponseTooLarge, ResponseUnread, retry_after_seconds
from bridge.imds.document import MAX_DOCUMENT_BYTES, parse_attested, parse_document, parse_identity
from bridge.sink import AttestedTokens
from bridge.system.access_tokens import RenewedToken
from bridge.text import EXCERPT_CHARACTERS, excerpt, one_line

_IDENTITY_PATH = "/metadata/instance/compute?api-version=2021-02-01&format=json"
_ATTESTED_PATH = "/metadata/attested/document"
_ATTESTED_QUERY = "?api-version=2020-09-01&nonce="
_OK = 200
_BAD_REQUEST = 400


class ImdsClient:
    """The metadata service of this VM.

    Three threads can call `scheduled_events`, `identity`, and `start_requests` at the same time.
    `scheduled_events_again` belongs to the thread of `start_requests`. *endpoint* is a URL such as
    ``http://169.254.169.254``. *first_timeout_seconds* is the deadline of `scheduled_events` until the first 200, and
    again if the last 200 is more than a day old. *timeout_seconds* is the deadline of all other requests. *clock*
    returns Unix time.
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
        self._poll_session = DeadlineSession()
        self._identity_session = DeadlineSession()
        self._approval_session = DeadlineSession()
        self._url = f"{self.endpoint}/metadata/scheduledevents?api-version={quote(api_version, safe='')}"
        self._poll_request = self._prepared("GET", self._url)
        self._confirm_request = self._prepared("GET", self._url)
        self._identity_request = self._prepared("GET", self.endpoint + _IDENTITY_PATH)
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
        response = self._send(self._poll_session, self._poll_request, self.deadline_seconds)
        self._answered_at = self._clock()
        last = self._last
        if last is None or response.content != last[0]:
            last = self._last = (response.content, parse_document(response.content))
        return last[1]

    def scheduled_events_again(self) -> Document:
        """Return the current document over the connection of `start_requests`; raise the same errors.

        If the bytes equal those of the last poll, return the object that `scheduled_events` returned.
        """
        response = self._send(self._approval_session, self._confirm_request, self._timeout_seconds)
        last = self._last
        return last[1] if last is not None and response.content == last[0] else parse_document(response.content)

    def identity(self) -> VmIdentity:
        """Return the identity of this VM. Raises the same errors as a poll."""
        response = self._send(self._identity_session, self._identity_request, self._timeout_seconds)
        return parse_identity(response.content)

    def attested_document(self, nonce: str) -> str:
        """Return the signed document with the identity of this VM and *nonce*, in base64.

        The service may return an earlier document with another nonce. Any thread can call this method. It raises the
        same errors as a poll, with the same message for every nonce.
        """
        request = self._prepared("GET", self.endpoint + _ATTESTED_PATH + _ATTESTED_QUERY + quote(nonce, safe=""))
        with DeadlineSession() as session:
            response = self._send(session, request, self._timeout_seconds, path=_ATTESTED_PATH)
        return parse_attested(response.content)

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
        request = self._prepared("POST", self._url, body=json.dumps(wanted).encode())
        return self._send(self._approval_session, request, self._timeout_seconds).status_code

    def close(self) -> None:
        """Close every connection and end the calls of other threads. A second call has no effect."""
        for session in (self._poll_session, self._identity_session, self._approval_session):
            session.close()

    def _prepared(self, method: str, url: str, *, body: bytes | None = None) -> requests.PreparedRequest:
        # The service needs neither Accept nor Connection, and each header costs time in every poll.
        headers = {"Metadata": "true", "Accept-Encoding": "identity", "Accept": None, "Connection": None}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            return self._poll_session.prepare_request(requests.Request(method, url, headers=headers, data=body))
        except requests.RequestException as exc:
            raise ConfigurationError(
                f"imds.endpoint is {self.endpoint!r}, which is not a URL ({exc}). Remove the key, or use a URL such as "
                "http://169.254.169.254."
            ) from exc

    def _send(
        self,
        session: DeadlineSession,
        request: requests.PreparedRequest,
        timeout_seconds: float,
        *,
        path: str | None = None,
    ) -> requests.Response:
        """Return the response to *request* if its status is 200; raise ImdsError otherwise.

        *path* replaces the path in messages, so that the message does not contain a nonce.
        """
        try:
            response = session.send(request, deadline_seconds=timeout_seconds, max_body_bytes=MAX_DOCUMENT_BYTES)
        except ResponseUnread as exc:
            if exc.response is None or (exc.response.status_code == _OK and request.method == "GET"):
                raise DocumentInvalid(f"{self._called(request, path)}: {_unread(exc)}") from exc
            response = exc.response  # only the status counts
        except (DeadlineExceeded, requests.RequestException, OSError) as exc:
            raise ImdsUnreachable(
                f"The metadata service at {self.endpoint} gave no answer to {request.method} "
                f"{path or request.path_url}: {_reason(exc)}. It is asked again."
            ) from exc
        if response.status_code != _OK:
            raise ImdsStatus(
                f"{self._called(request, path)}: {self._complaint(response)}",
                status=response.status_code,
                retry_after_seconds=retry_after_seconds(response.headers),
            )
        return response

    def _called(self, request: requests.PreparedRequest, path: str | None) -> str:
        return f"{request.method} {request.url if path is None else self.endpoint + path}"

    def _complaint(self, response: requests.Response) -> str:
        """Return the error in *response* as a sentence."""
        status = f"{response.status_code} {response.reason or ''}".strip()
        if response.is_redirect:
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


def _reason(error: BaseException) -> str:
    """Return the innermost reason without the texts of requests and urllib3."""
    if not isinstance(error, DeadlineExceeded):
        error = root_cause(error)
    return (str(error) or type(error).__name__).rstrip(".")


def _unread(error: ResponseUnread) -> str:
    """Return why the body of a 200 was not read, as a sentence."""
    if not isinstance(error, ResponseTooLarge):
        return str(error)
    return (
        f"The response is larger than {MAX_DOCUMENT_BYTES // 1024**2} MiB and was not read. "
        "Check that imds.endpoint is the metadata service."
    )


def _newest_versions(response: requests.Response) -> str:
    """Return the versions that a 400 lists, separated by commas; "" if the response lists no versions."""
    try:
        answer = json.loads(response.content)
    except (ValueError, RecursionError):
        return ""
    versions = answer.get("newest-versions") if isinstance(answer, dict) else None
    named = [version for version in versions if isinstance(version, str)] if isinstance(versions, list) else []
    return one_line(", ".join(named[:10]), EXCERPT_CHARACTERS)
