"""ImdsClient: asks the Instance Metadata Service for the Scheduled Events document and for who this VM is; approves.

Microsoft, "Scheduled Events for Linux VMs in Azure" and "Azure Instance Metadata Service": every request carries
``Metadata: true``; one with an X-Forwarded-For is refused, so no proxy is ever used and no redirect followed. The
first request turns the feature on and may take two minutes; after 24 hours without one it is off again.

An idle poll is what the agent does all day, so its request is prepared once, and an answer with the same bytes as the
last good one returns the same Document, unparsed.
"""

from __future__ import annotations

import json
import logging
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
from bridge.imds.discovery import find_endpoint
from bridge.imds.document import MAX_DOCUMENT_BYTES, parse_attested, parse_document, parse_identity, parse_os_disk
from bridge.sink import AttestedTokens
from bridge.system.access_tokens import RenewedToken
from bridge.text import EXCERPT_CHARACTERS, excerpt, one_line

logger = logging.getLogger(__name__)

_IDENTITY_PATH = "/metadata/instance/compute?api-version=2021-02-01&format=json"
_ATTESTED_PATH = "/metadata/attested/document"
_ATTESTED_QUERY = "?api-version=2020-09-01&nonce="
_OK = 200
_BAD_REQUEST = 400


class ImdsClient:
    """The metadata service of this VM.

    `scheduled_events`, `identity` and `start_requests` may run in three threads at once; `scheduled_events_again`
    belongs to the thread of `start_requests`. *endpoint* is a URL like
    ``http://169.254.169.254``, or "auto": the address of DHCP option 245 (see `bridge.imds.discovery`). What it turned
    out to be is in ``endpoint``. *first_timeout_seconds* holds for `scheduled_events` until a first 200, and again when
    the last one is more than a day old; *timeout_seconds* for everything else. Both are wall-clock. *clock* gives Unix
    time.
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
        self.endpoint = _resolved(endpoint)
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
        self.os_disk_is_ephemeral: bool | None = None
        """What the last answer to `identity` names; None before one, or when it names none."""

    @property
    def deadline_seconds(self) -> float:
        """How long the next `scheduled_events` may take, in seconds."""
        is_on = self._answered_at is not None and self._clock() - self._answered_at < SERVICE_OFF_AFTER_SECONDS
        return self._timeout_seconds if is_on else max(self._timeout_seconds, self._first_timeout_seconds)

    def go_on_from(self, before: ImdsClient) -> None:
        """Know what *before*, a client of the same service, was answered: the feature is on, and which disk it has."""
        self._answered_at = before._answered_at
        self.os_disk_is_ephemeral = before.os_disk_is_ephemeral

    def scheduled_events(self) -> Document:
        """Return the Scheduled Events document; the very same object while its bytes do not change.

        Raises ImdsUnreachable, ImdsStatus for anything but a 200, and DocumentInvalid for a 200 that is no document:
        each means that the state is unknown, never that there are no events.
        """
        response = self._send(self._poll_session, self._poll_request, self.deadline_seconds)
        self._answered_at = self._clock()
        last = self._last
        if last is None or response.content != last[0]:
            last = self._last = (response.content, parse_document(response.content))
        return last[1]

    def scheduled_events_again(self) -> Document:
        """Return the document as it is now, over the connection of `start_requests`; raise as `scheduled_events`.

        While the bytes are those of the last poll, it is the object that `scheduled_events` returned.
        """
        response = self._send(self._approval_session, self._confirm_request, self._timeout_seconds)
        last = self._last
        return last[1] if last is not None and response.content == last[0] else parse_document(response.content)

    def identity(self) -> VmIdentity:
        """Return who this VM is, and note what the same answer says of its OS disk; raise as `scheduled_events`."""
        response = self._send(self._identity_session, self._identity_request, self._timeout_seconds)
        found = parse_identity(response.content)
        self.os_disk_is_ephemeral = parse_os_disk(response.content)
        return found

    def attested_document(self, nonce: str) -> str:
        """Return the signed document in which Azure says who this VM is, with *nonce* in it, in base64.

        It may be an earlier one, with another nonce. Any thread may ask. Raises as `scheduled_events`, with the same
        words for any nonce.
        """
        request = self._prepared("GET", self.endpoint + _ATTESTED_PATH + _ATTESTED_QUERY + quote(nonce, safe=""))
        with DeadlineSession() as session:
            response = self._send(session, request, self._timeout_seconds, path=_ATTESTED_PATH)
        return parse_attested(response.content)

    def start_requests(self, event_ids: Sequence[str], *, incarnation: Incarnation) -> int:
        """Approve the events called *event_ids* and return the status, which is 200; never sent twice.

        The versions of 2017 also want the *incarnation* of the document that announced them. After ImdsUnreachable
        it is unknown whether the service took the approval. Raises ImdsStatus for anything but a 200.
        """
        if not event_ids:
            raise ValueError("start_requests was given no EventId; there is nothing to approve.")
        wanted: dict[str, object] = {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        if self.api_version.startswith("2017") and incarnation is not None:
            wanted["DocumentIncarnation"] = incarnation
        request = self._prepared("POST", self._url, body=json.dumps(wanted).encode())
        return self._send(self._approval_session, request, self._timeout_seconds).status_code

    def close(self) -> None:
        """Close every connection and break off calls in flight; closing twice is fine."""
        for session in (self._poll_session, self._identity_session, self._approval_session):
            session.close()

    def _prepared(self, method: str, url: str, *, body: bytes | None = None) -> requests.PreparedRequest:
        # identity: a compressed answer that was cut, without its checksum, could pass for a whole one.
        # Accept and Connection, which requests adds, say nothing here, and each costs a little with every poll.
        headers = {"Metadata": "true", "Accept-Encoding": "identity", "Accept": None, "Connection": None}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            return self._poll_session.prepare_request(requests.Request(method, url, headers=headers, data=body))
        except requests.RequestException as exc:
            raise ConfigurationError(
                f"imds.endpoint is {self.endpoint!r}, which is no URL ({exc}); leave it out, or write it like "
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
        """Return the answer to *request* when it is a 200, raise what is wrong with it otherwise.

        *path* is what messages call what is asked for, where the request itself differs from time to time.
        """
        try:
            response = session.send(request, deadline_seconds=timeout_seconds, max_body_bytes=MAX_DOCUMENT_BYTES)
        except ResponseUnread as exc:
            if exc.response is None or (exc.response.status_code == _OK and request.method == "GET"):
                raise DocumentInvalid(f"{self._called(request, path)}: {_unread(exc)}") from exc
            response = exc.response  # what counts of it is the status
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
        """Return what the answer says is wrong, as a sentence."""
        status = f"{response.status_code} {response.reason or ''}".strip()
        if response.is_redirect:
            return f"{status}, a redirect. The metadata service sends none, so it is not followed; see imds.endpoint."
        versions = _newest_versions(response) if response.status_code == _BAD_REQUEST else ""
        if versions:
            return (
                f"{status}. The service does not know api-version {self.api_version!r} here; the newest it names are "
                f"{versions}. Set imds.api_version to one that it knows, such as 2020-07-01."
            )
        body = excerpt(response.content)
        return f"{status}: {body}" if body else f"{status}, without a word."


def client_of(settings: ImdsSettings, *, at_most_seconds: float | None = None) -> ImdsClient:
    """Return a client as *settings* say; with *at_most_seconds* no request of it takes longer, nor the first."""
    within = settings.timeout_seconds if at_most_seconds is None else min(settings.timeout_seconds, at_most_seconds)
    return ImdsClient(
        endpoint=settings.endpoint,
        api_version=settings.api_version,
        timeout_seconds=within,
        first_timeout_seconds=settings.first_timeout_seconds if at_most_seconds is None else within,
    )


def attested_document(settings: ImdsSettings, nonce: str) -> str:
    """Return this VM's attested document with *nonce* in it, as `ImdsClient.attested_document` does."""
    with closing(client_of(settings, at_most_seconds=settings.timeout_seconds)) as imds:
        return imds.attested_document(nonce)


def attested_tokens(document: Callable[[str], str]) -> AttestedTokens:
    """Return how sinks get a portal's token for this VM, whose attested document for a nonce *document* returns."""

    def make(post: Callable[[str, bytes], requests.Response], *, portal: str) -> RenewedToken:
        from bridge.system.access_tokens import AttestedToken  # noqa: PLC0415  # only who is configured so pays for it

        return AttestedToken(post, document, portal=portal)

    return make


def _reason(error: BaseException) -> str:
    """Return the innermost reason: requests and urllib3 wrap it in texts about their own objects."""
    if not isinstance(error, DeadlineExceeded):
        error = root_cause(error)
    return (str(error) or type(error).__name__).rstrip(".")


def _unread(error: ResponseUnread) -> str:
    """Return why an answer with a 200 is not read, as a sentence."""
    if not isinstance(error, ResponseTooLarge):
        return str(error)
    return (
        f"The answer is larger than {MAX_DOCUMENT_BYTES // 1024**2} MiB, so it is not read: what it says is unknown. "
        "Is imds.endpoint the metadata service?"
    )


def _resolved(endpoint: str) -> str:
    if endpoint != "auto":
        return endpoint.rstrip("/")
    found = find_endpoint()
    logger.info("imds.endpoint is auto: the metadata service is looked for at %s", found)
    return found


def _newest_versions(response: requests.Response) -> str:
    """Return the versions that a 400 lists, separated by commas, or "" when it lists none."""
    try:
        answer = json.loads(response.content)
    except (ValueError, RecursionError):
        return ""
    versions = answer.get("newest-versions") if isinstance(answer, dict) else None
    named = [version for version in versions if isinstance(version, str)] if isinstance(versions, list) else []
    return one_line(", ".join(named[:10]), EXCERPT_CHARACTERS)
