"""Sends requests to the ops portal (PROTOCOL.md, sections 2 to 4).

If a response is malformed, the client raises PortalFailed. Error messages never quote a response, because it could
contain the bearer token or a decision. As a result, repeated failures have the same message, which the agent logs only
once.

The client does not follow redirects. It uses the proxy from the environment variables, except for loopback URLs. These
URLs can use plain HTTP, so a proxy could read the token.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote, urlsplit

import msgspec
import requests
from msgspec import Meta

from bridge import strict_json
from bridge.approval.credentials import TOKEN_DEADLINE_SECONDS, secret_token
from bridge.approval.files import is_disabled
from bridge.config.approval import ApprovalSettings, RemoteSettings
from bridge.config.trusted_keys import TrustedKey, unusable_keys
from bridge.errors import DeadlineExceeded, PortalFailed
from bridge.http.failures import is_loopback, root_cause
from bridge.http.retry_after import retry_after_seconds
from bridge.http.session import DeadlineSession, ResponseUnread
from bridge.system.access_tokens import AccessToken, AttestedToken, RenewedToken, token_of
from bridge.text import EXCERPT_CHARACTERS, one_line

#: The deadline of a request is the time that the portal can wait (`wait_seconds`) plus this grace period.
GRACE_SECONDS = 10.0
MAX_ANSWER_BYTES = 1024 * 1024
MAX_DECISIONS = 1_000
MAX_INDEX = 2**53 - 1
MAX_EPOCH_CHARACTERS = 128
#: Describes the agent in each request (`agent_header`).
AGENT_HEADER = "Scheduled-Events-Agent"
_MAX_TOKEN_ANSWER_BYTES = 16 * 1024

_OK, _NO_CONTENT = 200, 204
_REFUSED = frozenset({401, 403})
_GATEWAY = "Set approval.remote.wait_seconds below the timeout of the gateway in front of the portal."
_ADVICE = {
    401: "Check the token or the client certificate of approval.remote.",
    403: "Check the token or the client certificate of approval.remote and its permissions.",
    404: "Either the portal does not know this VM, or approval.remote.url is wrong.",
    410: "Either the portal does not know this VM, or approval.remote.url is wrong.",
    504: _GATEWAY,
}
_REFUSED_AGAIN = "The portal also refuses the replacement token. Check vm.vm_id and the portal's log."
_SAYS_WHEN = frozenset({429, 503})
_REDIRECTS = range(300, 400)
_UNCHANGED = 304


class PortalAnswer(msgspec.Struct, frozen=True):
    """The body of a valid response. Unknown members are ignored."""

    index: Annotated[int, Meta(ge=1, le=MAX_INDEX)]
    decisions: Annotated[tuple[str, ...], Meta(max_length=MAX_DECISIONS)]
    epoch: Annotated[str, Meta(min_length=1, max_length=MAX_EPOCH_CHARACTERS)] | None = None
    """The epoch in which the index is valid, or None if the portal sends no epoch."""


def agent_header(settings: ApprovalSettings, keys: Sequence[TrustedKey], *, version: str, directory: Path) -> str:
    """Return the header that describes the agent to the portal (PROTOCOL.md, section 2).

    The header lists only the keys whose files are valid. *directory* is the agent's state directory.
    """
    about = {
        "version": version,
        "required_approvals": 1 if settings.remote is None else settings.remote.required_approvals,
        "dry_run": settings.dry_run,
        "disabled": is_disabled(directory),
        "command": settings.remote is not None and settings.remote.command is not None,
        "command_covers_all": settings.remote is not None and settings.remote.command_covers_all,
        "kids": [key.kid for key in keys if not unusable_keys([key])],
    }
    return json.dumps(about, separators=(",", ":"))


class PortalClient:
    """Sends requests to the portal that *remote* configures. Only `close` is thread-safe.

    *document* takes a nonce and returns the attested document. The credential ``attested`` requires this argument.
    *agent* returns the value of the header that describes the agent.
    """

    def __init__(
        self,
        remote: RemoteSettings,
        *,
        token: RenewedToken | None = None,
        document: Callable[[str], str] | None = None,
        agent: Callable[[], str] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        parts = urlsplit(remote.url)
        is_local = is_loopback(parts.hostname or "")
        self.origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._remote = remote
        self._url = remote.url.rstrip("/")
        self._agent = agent
        self._deadline_seconds = remote.wait_seconds + grace_seconds
        self.longest_poll_seconds = self._deadline_seconds + TOKEN_DEADLINE_SECONDS
        """The maximum duration of `poll`, including the wait for a token."""
        self._certificate: str | tuple[str, str] | None = remote.client_cert_file
        if remote.client_cert_file is not None and remote.client_key_file is not None:
            self._certificate = (remote.client_cert_file, remote.client_key_file)
        self._token_session: DeadlineSession | None = None
        self._session = _session()
        self._proxies = {} if is_local else requests.utils.get_environ_proxies(self._url)
        if remote.credential is not None:
            token = self._attested_token(document)
        elif remote.entra_scope is not None:
            token = token_of(remote.entra_scope, key="approval.remote.entra_scope")
        self._renewed = token
        self._shown: AccessToken | None = None
        """The token of the last request, if the agent renews the token."""

    def poll(self, vm_id: str, *, index: int) -> PortalAnswer:
        """Return the decisions for *vm_id* after *index*.

        If there are no new decisions, the result has the same *index* and no decisions. Raises PortalFailed or
        CredentialFailed.
        """
        headers = {"Accept": "application/json"}
        token = self.bearer()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if self._agent is not None:
            headers[AGENT_HEADER] = self._agent()
        response = self._request(
            self._session,
            "GET",
            f"/vms/{quote(vm_id.lower(), safe='')}/decisions",
            params={"index": str(index), "wait": str(self._remote.wait_seconds)},
            headers=headers,
            deadline_seconds=self._deadline_seconds,
            max_body_bytes=MAX_ANSWER_BYTES,
        )
        if response.status_code == _NO_CONTENT:
            return PortalAnswer(index, ())
        if response.status_code != _OK:
            self._refuse(response)
        return self._read(response.content)

    def bearer(self) -> str | None:
        """Return the bearer token, or None if no token is configured. Raises CredentialFailed."""
        if self._renewed is None:
            return secret_token(self._remote)
        self._shown = self._renewed.current(wait_seconds=TOKEN_DEADLINE_SECONDS)
        return self._shown.token

    def drop_connections(self) -> None:
        """Close all idle connections. After a failure, a new one might reach a working server."""
        self._session.close()

    def close(self) -> None:
        """Cancel the current request. If the client is waiting for a token, stop waiting."""
        if self._renewed is not None:
            self._renewed.close()
        self._session.close()
        if self._token_session is not None:
            self._token_session.close()

    def _attested_token(self, document: Callable[[str], str] | None) -> RenewedToken:
        if document is None:
            raise ValueError("The credential `attested` requires the argument *document*.")
        # Another thread requests tokens. Its session is separate, so that its failure does not end a poll.
        session = self._token_session = _session()
        return AttestedToken(partial(self._post, session), document, portal=self.origin)

    def _post(self, session: DeadlineSession, path: str, body: bytes) -> requests.Response:
        try:
            return self._request(
                session,
                "POST",
                path,
                data=body,
                headers={"Accept": "application/json", "Content-Type": "application/json", "Connection": "close"},
                deadline_seconds=TOKEN_DEADLINE_SECONDS,
                max_body_bytes=_MAX_TOKEN_ANSWER_BYTES,
            )
        finally:
            # The server closes the connection after the response, even if the response has no "Connection: close".
            session.close()

    def _request(
        self,
        session: DeadlineSession,
        method: str,
        path: str,
        *,
        deadline_seconds: float,
        max_body_bytes: int,
        **options: Any,
    ) -> requests.Response:
        try:
            return session.request(
                method,
                f"{self._url}{path}",
                deadline_seconds=deadline_seconds,
                max_body_bytes=max_body_bytes,
                proxies=self._proxies,
                verify=self._remote.ca_file or True,
                cert=self._certificate,
                **options,
            )
        except ResponseUnread as error:
            if error.response is not None and error.response.status_code != _OK:
                return error.response  # only its status counts
            raise PortalFailed(
                f"The portal at {self.origin} sent a response with more than {max_body_bytes} bytes or with a "
                "Content-Encoding. The agent ignores the response."
            ) from error
        except DeadlineExceeded as error:
            raise PortalFailed(
                f"The portal at {self.origin} sent no complete response within {deadline_seconds:g} s."
            ) from error
        except (requests.RequestException, OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _refuse(self, response: requests.Response) -> NoReturn:
        status = response.status_code
        has_new_token = False
        if status in _REFUSED and self._renewed is not None and self._shown is not None:
            has_new_token = self._renewed.refuse(self._shown)
        advice = _ADVICE.get(status, "")
        if status in _REFUSED and self._remote.credential is not None:
            advice = "The agent requests another token." if has_new_token else _REFUSED_AGAIN
        if status in _REDIRECTS and status != _UNCHANGED:
            advice = "The agent follows no redirects. Set approval.remote.url to the final address."
        message = (
            f"The portal at {self.origin} responded with {status} {http.client.responses.get(status, '')}".rstrip()
        )
        raise PortalFailed(
            f"{message}. {advice}".rstrip(),
            needs_attention=bool(advice) and advice is not _GATEWAY and not has_new_token,
            retry_after_seconds=retry_after_seconds(response.headers) if status in _SAYS_WHEN else None,
        )

    def _read(self, body: bytes) -> PortalAnswer:
        try:
            value = strict_json.loads(body.decode("utf-8", "replace"), allows_duplicates=True)
            if isinstance(value, dict) and isinstance(value.get("decisions"), list):
                # Replace each invalid value with "", which the inbox refuses. The others count, and one may be a hold.
                value["decisions"] = [each if isinstance(each, str) else "" for each in value["decisions"]]
            return msgspec.convert(value, PortalAnswer)
        except ValueError as error:
            # Other errors quote the response or differ from attempt to attempt.
            shape = f" ({error})" if isinstance(error, msgspec.ValidationError) else ""
            raise PortalFailed(
                f"The portal at {self.origin} responded with 200 and an invalid body{shape}. The agent ignores it."
            ) from error

    def _unreachable(self, error: Exception) -> PortalFailed:
        cause = root_cause(error)
        is_tls = isinstance(error, requests.exceptions.SSLError) and not isinstance(cause, _BROKEN_OFF)
        # For example, if a certificate file is missing, requests raises an error before it connects.
        is_ours = not isinstance(error, requests.RequestException) or isinstance(error, ValueError)
        via = "the proxy from the environment failed: " if isinstance(error, requests.exceptions.ProxyError) else ""
        why = f"{via}{_words(cause)}".rstrip(".")
        return PortalFailed(f"The portal at {self.origin} cannot be reached: {why}.", needs_attention=is_tls or is_ours)


def _session() -> DeadlineSession:
    session = DeadlineSession()
    session.headers["User-Agent"] = "scheduled-events-bridge"
    return session


#: The peer closed the connection during TLS. The certificates are not the cause.
_BROKEN_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError, TimeoutError)


def _words(cause: BaseException) -> str:
    if isinstance(cause, http.client.RemoteDisconnected):
        return "it closed the connection without a response"
    if isinstance(cause, OSError) and not isinstance(cause, requests.RequestException):
        return one_line(str(cause) or type(cause).__name__, EXCERPT_CHARACTERS)
    return type(cause).__name__
