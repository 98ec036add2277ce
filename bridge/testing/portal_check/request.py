"""Sends one request to a portal in the same way as an agent, and describes the response.

The description never contains the token, even if the portal repeats the token in its response. A failed request does
not raise an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from urllib.parse import quote, urlsplit

import msgspec
import requests

from bridge.approval.portal_client import AGENT_HEADER, GRACE_SECONDS, MAX_ANSWER_BYTES, PortalClient
from bridge.config.approval import RemoteSettings
from bridge.errors import BridgeError, DeadlineExceeded
from bridge.http.failures import is_loopback, root_cause
from bridge.http.session import DeadlineSession, ResponseUnread
from bridge.system.secrets import MASK
from bridge.text import EXCERPT_CHARACTERS, one_line

_AGENT = '{"version":"portal-check"}'
_POST_SECONDS = 10.0


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its response."""

    asked: str
    """The request on one line, without the token."""
    seconds: float
    """The time from the request to the end of the response."""
    status: int | None = None
    """The response's status, or None if no response arrived."""
    headers: Mapping[str, str] = {}
    body: bytes = b""
    problem: str | None = None
    """The reason why no response arrived, or why the body was not read."""

    @property
    def result(self) -> str:
        """Return the status, or the reason why no response arrived."""
        return f"{self.problem}" if self.status is None else f"The response is {self.status}"

    @property
    def answered(self) -> str:
        """Return the response on one line."""
        if self.status is None:
            return f"{self.problem} (after {self.seconds:.2f} s)"
        kind = self.headers.get("Content-Type", "no Content-Type")
        size = f"{len(self.body)} bytes" if self.problem is None else self.problem
        text = one_line(self.body.decode("utf-8", "replace"), EXCERPT_CHARACTERS)
        return f"{self.status}, {kind}, {size}, after {self.seconds:.2f} s{f': {text}' if text else ''}"


class CheckClient:
    """Sends requests to the portal in *remote* for the VM *vm_id*.

    Do not share a client between threads.

    If the `credential` setting is "attested", *document* must return an attested document for a given nonce.
    """

    def __init__(self, remote: RemoteSettings, vm_id: str, *, document: Callable[[str], str] | None = None) -> None:
        self.vm_id = vm_id.lower()
        self.has_certificate = remote.client_cert_file is not None
        self.is_attested = remote.credential is not None
        """True if the token identifies this VM."""
        self._own: str | None = None
        self._remote = remote
        self._url = remote.url.rstrip("/")
        self._client = PortalClient(remote, document=document)
        self._session = DeadlineSession()
        self._session.headers["User-Agent"] = "scheduled-events-bridge"
        is_local = is_loopback(urlsplit(remote.url).hostname or "")
        self._proxies = {} if is_local else requests.utils.get_environ_proxies(self._url)

    def poll(self, index: int, wait_seconds: int, *, vm_id: str | None = None, token: str | None = None) -> Exchange:
        """Request the decisions after *index*.

        *token* replaces the VM's token, and "" sends no credential.
        """
        vm_id = self.vm_id if vm_id is None else vm_id
        return self._ask(
            "GET",
            f"{self._url}/vms/{quote(vm_id, safe='')}/decisions?index={index}&wait={wait_seconds}",
            deadline_seconds=wait_seconds + GRACE_SECONDS,
            headers={"Accept": "application/json", AGENT_HEADER: _AGENT},
            token=token,
        )

    def post(self, url: str, body: bytes) -> Exchange:
        """Send a record in the same way as the `webhook` sink, with the same token."""
        headers = {"Content-Type": "application/cloudevents+json"}
        return self._ask("POST", url, deadline_seconds=_POST_SECONDS, headers=headers, token=None, body=body)

    def post_plain(self, path: str, body: bytes) -> Exchange:
        """Send JSON to *path* below the portal's URL, without a credential."""
        headers = {"Content-Type": "application/json"}
        return self._ask("POST", self._url + path, deadline_seconds=_POST_SECONDS, headers=headers, token="", body=body)

    def bearer(self) -> str | None:
        """Return the VM's token, or None if the VM uses a client certificate.

        Raises CredentialFailed.
        """
        self._own = self._client.bearer()
        return self._own

    def close(self) -> None:
        """Close the client, and cancel a request that another thread has sent."""
        self._client.close()
        self._session.close()

    def _ask(
        self,
        method: str,
        url: str,
        *,
        deadline_seconds: float,
        headers: dict[str, str],
        token: str | None,
        body: bytes | None = None,
    ) -> Exchange:
        own = self._own if token == "" else self.bearer()
        shown = own if token is None else token
        if shown:
            headers["Authorization"] = f"Bearer {shown}"
        whose = "without Authorization" if not shown else f"Authorization: Bearer {MASK if token is None else token}"
        certificate = self._certificate() if token is None else None
        if self.has_certificate and certificate is None:
            self._session.close()  # an open connection is already authenticated with the certificate
        if self.has_certificate:
            whose = "with the client certificate" if certificate else "without a client certificate"
        asked = f"{method} {url}, {whose}"
        began_at = time.monotonic()
        try:
            response = self._session.request(
                method,
                url,
                headers=headers,
                data=body,
                deadline_seconds=deadline_seconds,
                max_body_bytes=MAX_ANSWER_BYTES,
                proxies=self._proxies,
                verify=self._remote.ca_file or True,
                cert=certificate,
            )
        except (BridgeError, requests.RequestException, OSError, ValueError) as error:
            return _failed(error, asked=asked, seconds=time.monotonic() - began_at)
        return Exchange(
            asked=asked,
            seconds=time.monotonic() - began_at,
            status=response.status_code,
            headers=response.headers,
            body=response.content if not own else response.content.replace(own.encode(), MASK.encode()),
        )

    def _certificate(self) -> str | tuple[str, str] | None:
        certificate, key = self._remote.client_cert_file, self._remote.client_key_file
        return certificate if certificate is None or key is None else (certificate, key)


def _failed(error: Exception, *, asked: str, seconds: float) -> Exchange:
    if isinstance(error, ResponseUnread) and error.response is not None:
        coding = one_line(error.response.headers.get("Content-Encoding", ""), EXCERPT_CHARACTERS)
        return Exchange(
            asked=asked,
            seconds=seconds,
            status=error.response.status_code,
            headers=error.response.headers,
            problem=f"Content-Encoding {coding}, not read" if coding else "more than 1 MiB, not read to its end",
        )
    if isinstance(error, DeadlineExceeded):
        return Exchange(asked=asked, seconds=seconds, problem="no complete answer")
    cause = root_cause(error)
    words = one_line(str(cause), EXCERPT_CHARACTERS) or type(cause).__name__
    return Exchange(asked=asked, seconds=seconds, problem=f"no answer: {words.rstrip('.')}")
