"""Portal client: one request to the ops portal, and what its answer means (PROTOCOL.md, sections 2 to 4).

Only an answer of exactly that shape is one; all else is PortalFailed, with nothing of it used. No message quotes
the portal: who answers there may repeat the token that it was shown, or a decision. A message stays the same from try
to try, so that one fault is one line in the log.

A gateway on the way may be less patient than the request: what it breaks off after a while is no fault of the portal.
The client then asks for half the wait, and for its own again an hour later.

No redirect is followed, and a proxy is one that the environment names. To a loopback address there is none: plain
http, which is allowed there alone, would show it the token.
"""

from __future__ import annotations

import http.client
import math
import ssl
from collections.abc import Callable
from functools import partial
from typing import Annotated, NoReturn
from urllib.parse import quote, urlsplit

import msgspec
import requests
from msgspec import Meta

from bridge import strict_json
from bridge.approval.credentials import TOKEN_DEADLINE_SECONDS, AttestedCredential, PortalCredential, credential_of
from bridge.clock import REAL_CLOCK, Clock
from bridge.config.approval import RemoteSettings
from bridge.errors import ConfigurationError, CredentialFailed, DeadlineExceeded, PortalFailed
from bridge.http.failures import is_loopback, root_cause
from bridge.http.session import (
    DeadlineSession,
    ResponseEncoded,
    ResponseTooLarge,
    ResponseUnread,
    is_disconnect,
    retry_after_seconds,
)
from bridge.text import EXCERPT_CHARACTERS, one_line

#: A request may last so much longer than the portal may hold it.
GRACE_SECONDS = 10.0
MAX_ANSWER_BYTES = 1024 * 1024
MAX_DECISIONS = 1_000
MAX_INDEX = 2**53 - 1
MAX_EPOCH_CHARACTERS = 128
#: What agents say of themselves with each request (`bridge.approval.service.agent_header`).
AGENT_HEADER = "Scheduled-Events-Agent"
#: A request that broke off later than this was held: a gateway on the way does not wait as long as the portal.
PATIENCE_SECONDS = 5.0
#: The wait that is asked for is not halved below this.
SHORTEST_WAIT_SECONDS = 5
_OWN_WAIT_AGAIN_SECONDS = 3_600.0

_MAX_TOKEN_ANSWER_BYTES = 16 * 1024

_OK, _NO_CONTENT = 200, 204
_REFUSED = frozenset({401, 403})
_NEEDS_A_PERSON = {
    401: "Check the token or the client certificate of approval.remote.",
    403: "Check the token or the client certificate of approval.remote, and what it is allowed to do.",
    404: "Either it does not know this VM, or approval.remote.url is wrong.",
    410: "Either it does not know this VM, or approval.remote.url is wrong.",
}
_REFUSES_ITS_OWN = "It refuses tokens that it gave itself: is vm.vm_id this VM's? See the portal's log."
_SAYS_WHEN = frozenset({429, 503})
_OF_A_GATEWAY = frozenset({502, 504})
_REDIRECTS = range(300, 400)
_UNCHANGED = 304
_NO_DECISION = ""


class PortalAnswer(msgspec.Struct, frozen=True):
    """What a good answer brought; further members are ignored."""

    index: Annotated[int, Meta(ge=1, le=MAX_INDEX)]
    decisions: Annotated[tuple[str, ...], Meta(max_length=MAX_DECISIONS)]
    epoch: Annotated[str, Meta(min_length=1, max_length=MAX_EPOCH_CHARACTERS)] | None = None
    """Which history the index counts in; None: the portal does not say."""


class PortalClient:
    """Asks the portal of *remote*; for one thread, but for `close`.

    *document* returns the attested document with a nonce in it, for `credential = "attested"`; *agent* returns what the
    agent says of itself, None for nothing. Raises ConfigurationError for plain http to another machine.
    """

    def __init__(
        self,
        remote: RemoteSettings,
        *,
        credential: PortalCredential | None = None,
        document: Callable[[str], str] | None = None,
        agent: Callable[[], str] | None = None,
        grace_seconds: float = GRACE_SECONDS,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        parts = urlsplit(remote.url)
        is_local = is_loopback(parts.hostname or "")
        if parts.scheme != "https" and not is_local:
            raise ConfigurationError(
                f"approval.remote.url begins with {parts.scheme}:// and leads to another machine; use https."
            )
        self.origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._remote = remote
        self._url = remote.url.rstrip("/")
        self._agent = agent
        self._clock = clock
        self._grace_seconds = grace_seconds
        self.wait_seconds = remote.wait_seconds
        """How long the portal is asked to hold a request: half of what was configured, or less, behind a gateway."""
        self._wait_lowered_at: float | None = None
        self._sent_at = -math.inf
        self.longest_poll_seconds = remote.wait_seconds + grace_seconds + TOKEN_DEADLINE_SECONDS
        """How long `poll` may take, the wait for a token included."""
        self._is_closed = False
        self._token_session: DeadlineSession | None = None
        self._session = _session()
        self._proxies = {} if is_local else requests.utils.get_environ_proxies(self._url)
        self._credential = credential or self._credential_of(remote, document)

    def poll(self, vm_id: str, *, index: int) -> PortalAnswer:
        """Return what there is for *vm_id* after *index*; a 204 reads as that index and nothing.

        Raise PortalFailed. One that is cut short has halved the wait, and may be asked again at once.
        """
        self._restore_wait()
        try:
            return self._ask(vm_id, index)
        except PortalFailed as error:
            was_held = self._clock.monotonic() - self._sent_at > PATIENCE_SECONDS
            if not (error.is_cut_short and was_held and self._halve_wait()):
                error.is_cut_short = False
            raise

    def _restore_wait(self) -> None:
        """Ask for the wait that was configured once more, when the gateway may be another one."""
        lowered_at = self._wait_lowered_at
        if lowered_at is not None and self._clock.monotonic() - lowered_at >= _OWN_WAIT_AGAIN_SECONDS:
            self.wait_seconds, self._wait_lowered_at = self._remote.wait_seconds, None

    def _halve_wait(self) -> bool:
        """Ask for half the wait from now on; return False when it is as short as it gets."""
        if self.wait_seconds <= SHORTEST_WAIT_SECONDS:
            return False
        self.wait_seconds = max(self.wait_seconds // 2, SHORTEST_WAIT_SECONDS)
        self._wait_lowered_at = self._clock.monotonic()
        return True

    @property
    def _deadline_seconds(self) -> float:
        return self.wait_seconds + self._grace_seconds

    def _ask(self, vm_id: str, index: int) -> PortalAnswer:
        try:
            response = self._get(vm_id, index)
        except CredentialFailed as error:
            raise PortalFailed(
                str(error), needs_attention=error.needs_attention, retry_after_seconds=error.retry_after_seconds
            ) from error
        except ResponseTooLarge as error:
            raise PortalFailed(
                f"The answer of the portal at {self.origin} is larger than {MAX_ANSWER_BYTES} bytes, and not used."
            ) from error
        except ResponseEncoded as error:
            if error.response is None or error.response.status_code == _OK:
                raise PortalFailed(
                    f"The answer of the portal at {self.origin} has a Content-Encoding, though none was asked for, and "
                    "is not used."
                ) from error
            response = error.response  # what counts of it is the status
        except DeadlineExceeded as error:
            raise PortalFailed(
                f"The portal at {self.origin} gave no complete answer within {self._deadline_seconds:g} s."
            ) from error
        except (requests.RequestException, OSError, ValueError) as error:
            raise self._unreachable(error) from error
        if response.status_code == _NO_CONTENT:
            return PortalAnswer(index, ())
        if response.status_code != _OK:
            self._refuse(response)
        return self._read(response.content)

    def bearer(self) -> str | None:
        """Return the token that is shown to the portal, None for none; raise CredentialFailed."""
        return self._credential.bearer()

    def drop_connections(self) -> None:
        """Close the idle connections: what failed may be the way that an old one takes, or a certificate it showed."""
        self._session.close()

    def stop_waiting(self) -> None:
        """Wait no longer for a token."""
        self._credential.close()

    def close(self) -> None:
        """Break off a call in flight, and begin none any more."""
        self._is_closed = True
        self._credential.close()
        self._session.close()
        if self._token_session is not None:
            self._token_session.close()

    def _credential_of(self, remote: RemoteSettings, document: Callable[[str], str] | None) -> PortalCredential:
        if remote.credential is None:
            return credential_of(remote)
        from bridge.system.access_tokens import AttestedToken  # noqa: PLC0415  # only who is configured so pays for it

        if document is None:
            raise ValueError("credential is attested, and no way to the metadata service was given.")
        # Of another thread: what fails there shall not cut a poll.
        session = self._token_session = _session()
        return AttestedCredential(AttestedToken(partial(self._post, session), document, portal=self.origin))

    def _post(self, session: DeadlineSession, path: str, body: bytes) -> requests.Response:
        """Return the answer to *body*, posted to *path*, whatever its status; raise PortalFailed without one."""
        try:
            return session.request(
                "POST",
                f"{self._url}{path}",
                data=body,
                headers={"Accept": "application/json", "Content-Type": "application/json", "Connection": "close"},
                deadline_seconds=TOKEN_DEADLINE_SECONDS,
                max_body_bytes=_MAX_TOKEN_ANSWER_BYTES,
                proxies=self._proxies,
                verify=self._remote.ca_file or True,
                cert=self._certificate(),
            )
        except ResponseUnread as error:
            if error.response is None:
                raise self._unreachable(error) from error
            return error.response  # what counts of it is the status; it reads as empty
        except DeadlineExceeded as error:
            raise PortalFailed(
                f"The portal at {self.origin} gave no complete answer within {TOKEN_DEADLINE_SECONDS:g} s."
            ) from error
        except (requests.RequestException, OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _get(self, vm_id: str, index: int) -> requests.Response:
        token = self._credential.bearer()
        if self._is_closed:
            raise PortalFailed(f"The portal at {self.origin} is not asked any more.")
        headers = {"Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if self._agent is not None:
            headers[AGENT_HEADER] = self._agent()
        self._sent_at = self._clock.monotonic()  # after the wait for a token, which is no patience of a gateway
        return self._session.request(
            "GET",
            f"{self._url}/vms/{quote(vm_id.lower(), safe='')}/decisions",
            params={"index": str(index), "wait": str(self.wait_seconds)},
            headers=headers,
            deadline_seconds=self._deadline_seconds,
            max_body_bytes=MAX_ANSWER_BYTES,
            proxies=self._proxies,
            verify=self._remote.ca_file or True,
            cert=self._certificate(),
        )

    def _certificate(self) -> str | tuple[str, str] | None:
        certificate, key = self._remote.client_cert_file, self._remote.client_key_file
        return certificate if certificate is None or key is None else (certificate, key)

    def _refuse(self, response: requests.Response) -> NoReturn:
        status = response.status_code
        is_mended = status in _REFUSED and self._credential.forget()
        advice = _NEEDS_A_PERSON.get(status, "")
        if status in _REFUSED and self._remote.credential is not None:
            advice = "It gave the token itself, and gives another." if is_mended else _REFUSES_ITS_OWN
        if status in _REDIRECTS and status != _UNCHANGED:
            advice = "Redirects are not followed. Put the right address into approval.remote.url."
        message = f"The portal at {self.origin} answered {status} {http.client.responses.get(status, '')}".rstrip()
        raise PortalFailed(
            f"{message}. {advice}".rstrip(),
            needs_attention=bool(advice) and not is_mended,
            retry_after_seconds=retry_after_seconds(response.headers) if status in _SAYS_WHEN else None,
            is_cut_short=status in _OF_A_GATEWAY,
        )

    def _read(self, body: bytes) -> PortalAnswer:
        try:
            return _answer(body)
        except ValueError as error:
            # Of the errors only this one is sure to quote nothing, and not to differ from try to try.
            shape = f" ({error})" if isinstance(error, msgspec.ValidationError) else ""
            raise PortalFailed(
                f"The portal at {self.origin} answered 200 with a body that is no answer{shape}, and not used."
            ) from error

    def _unreachable(self, error: Exception) -> PortalFailed:
        cause = root_cause(error)
        is_tls = isinstance(error, requests.exceptions.SSLError) and not isinstance(cause, _BROKEN_OFF)
        # The file of a certificate is not there: requests says so itself, before there is a connection.
        is_ours = not isinstance(error, requests.RequestException) or isinstance(error, ValueError)
        proxy = self._proxy_words(error)
        return PortalFailed(
            f"The portal at {self.origin} cannot be reached: {proxy}{_words(error, cause).rstrip('.')}.",
            needs_attention=is_tls or is_ours,
            is_cut_short=not is_ours and not proxy and is_disconnect(error),
        )

    def _proxy_words(self, error: Exception) -> str:
        """Return which proxy of the environment is to blame for *error*, without a password; empty for none."""
        if not isinstance(error, requests.exceptions.ProxyError):
            return ""
        url = requests.utils.select_proxy(self._url, self._proxies) or ""
        return f"the proxy {url.rpartition('//')[2].rpartition('@')[2]} of the environment does not let it through: "


def _session() -> DeadlineSession:
    session = DeadlineSession()
    session.headers["User-Agent"] = "scheduled-events-bridge"
    return session


def _answer(body: bytes) -> PortalAnswer:
    """Return what *body* says; raise ValueError when it is no answer.

    A decision that is no text of Unicode spoils none of the others, among which may be a hold: it is handed on as a
    text that is no decision, and refused by itself.
    """
    value = strict_json.loads(body.decode("utf-8", "replace"), allows_duplicates=True)
    if isinstance(value, dict) and isinstance(value.get("decisions"), list):
        value["decisions"] = [each if isinstance(each, str) else _NO_DECISION for each in value["decisions"]]
    return msgspec.convert(value, PortalAnswer)


#: The peer hung up under TLS: a broken connection, no quarrel about certificates.
_BROKEN_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError, TimeoutError)


def _words(error: Exception, cause: BaseException) -> str:
    """Return what went wrong without anything that a peer has sent or that stands in a header."""
    if isinstance(error, requests.exceptions.InvalidProxyURL):
        return one_line(str(error), EXCERPT_CHARACTERS)
    if isinstance(cause, http.client.RemoteDisconnected):
        return "it closed the connection without an answer"
    if isinstance(cause, OSError) and not isinstance(cause, requests.RequestException):
        return one_line(str(cause) or type(cause).__name__, EXCERPT_CHARACTERS)
    return type(cause).__name__
