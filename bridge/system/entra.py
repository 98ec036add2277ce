"""EntraToken: the Microsoft Entra ID access token of this machine's identity, fetched aside and before it expires.

Nobody waits for a token while an older one is still good: from half of its life on the next is fetched on a thread of
its own. When there is none the caller waits within its own deadline; a fetch that outlives that goes on, and what it
brings late is used. azure-identity waits for an endpoint without an end that could be relied on, and may wait on after
that is well again: so who needs a token asks once more beside a fetch that is silent. Few are under way at a time: an
endpoint that stays silent shall cost a few threads, not one a try.

A token never stands in a message.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import CredentialFailed
from bridge.http.session import BoundedSession
from bridge.system.threads import run_daemon
from bridge.text import EXCERPT_CHARACTERS, one_line

#: A token with less than this left is used only when no newer can be had: the service's clock may be ahead of ours.
_LEAST_SECONDS = 60.0
#: azure-core waits 300 s for an answer unless told otherwise.
_READ_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 5.0
#: How long a fetch is waited for alone. Four of them cover the time after which azure-identity gives up by itself.
_PATIENCE_SECONDS = 2.5
_MOST_FETCHES = 4
#: How long a token that came in place of a refused one is kept, refused or not: a new one would hardly fare better.
_REPLACEMENT_SECONDS = 300.0


class AccessToken(NamedTuple):
    """A token and when it expires, in seconds since 1970; named as azure-core's AccessToken is."""

    token: str
    expires_on: int


class EntraToken:
    """The token that *fetch* gets, which may hang or raise anything.

    *source* is what messages call it, *advice* what a person can do about an identity that gets none. A fetch is waited
    for alone no longer than *patience_seconds*.
    """

    def __init__(
        self,
        fetch: Callable[[], AccessToken],
        *,
        source: str,
        advice: str,
        clock: Clock = REAL_CLOCK,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._fetch = fetch
        self._source = source
        self._advice = advice
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._token: AccessToken | None = None
        self._renew_at = 0.0
        self._refused_at = -_REPLACEMENT_SECONDS
        self._fetching: list[Future[AccessToken]] = []
        """What is under way, the newest last."""
        self._began_at = 0.0
        self._closed: Future[Any] = Future()

    def current(self, *, wait_seconds: float) -> AccessToken:
        """Return a token that is good for now; raise CredentialFailed when there is none within *wait_seconds*."""
        token = self.good()
        if token is not None and self._clock.timestamp() < self._renew_at:
            return token
        if token is not None:
            self._begin()
            return token
        try:
            return self._awaited(wait_seconds)
        except CredentialFailed:
            last = self._token
            if last is None or self._clock.timestamp() >= last.expires_on:
                raise
            return last

    def good(self) -> AccessToken | None:
        """Return the token at hand unless it is about to expire."""
        token = self._token
        return token if token is not None and token.expires_on - self._clock.timestamp() > _LEAST_SECONDS else None

    def forget(self) -> None:
        """Drop the token: the service has refused it."""
        self._token = None

    def refuse(self, token: AccessToken) -> None:
        """Drop *token*, which the service has refused; one that came in its place stays for five minutes."""
        now = self._clock.monotonic()
        if token == self._token and now - self._refused_at >= _REPLACEMENT_SECONDS:
            self._refused_at = now
            self.forget()

    def close(self) -> None:
        """Break off the wait of another thread; the one that fetches ends when its own time is over."""
        with self._lock:
            if not self._closed.done():
                self._closed.set_result(None)

    def _begin(self) -> list[Future[AccessToken]]:
        """Return the fetches under way; begin one if there is none, or the newest takes long."""
        with self._lock:
            under_way = [each for each in self._fetching if not each.done()]
            is_late = self._clock.monotonic() - self._began_at >= self._patience_seconds
            if not under_way or (is_late and len(under_way) < _MOST_FETCHES):
                self._renew_at = self._clock.timestamp() + _RETRY_SECONDS  # should this fetch fail
                self._began_at = self._clock.monotonic()
                under_way.append(run_daemon("entra-token", self._fetched))
            self._fetching = under_way
            return under_way.copy()

    def _fetched(self) -> AccessToken:
        token = self._fetch()
        now = self._clock.timestamp()
        self._renew_at = now + max(_RETRY_SECONDS, (token.expires_on - now) / 2)
        self._token = token
        return token

    def _awaited(self, seconds: float) -> AccessToken:
        """Return the token that the first of the fetches brings; raise CredentialFailed when the newest has failed."""
        ends_at = time.monotonic() + seconds
        while True:
            fetching = self._begin()
            left = max(0.0, ends_at - time.monotonic())
            wait([*fetching, self._closed], min(left, self._patience_seconds), return_when=FIRST_COMPLETED)
            for each in fetching:
                if each.done() and each.exception() is None:
                    return each.result()
            error = fetching[-1].exception() if fetching[-1].done() else None
            if error is not None:
                raise self._failed(error) from error
            if self._closed.done() or time.monotonic() >= ends_at:
                raise CredentialFailed(
                    f"{self._source} gave no token within {seconds:.2g} s. Does the identity endpoint answer?",
                    needs_attention=False,
                )

    def _failed(self, error: BaseException) -> CredentialFailed:
        # What follows the first line differs from try to try, and would make a log line of each.
        reason = str(error).strip().partition("\n")[0].partition(" Trace ID:")[0]
        return CredentialFailed(
            f"{self._source} gave no token: {one_line(reason, EXCERPT_CHARACTERS)} {self._advice}",
            needs_attention=True,
        )


def token_of(scope: str, *, key: str, fetch: Callable[[], AccessToken] | None = None) -> EntraToken:
    """Return the token for *scope* of the identity that AZURE_CLIENT_ID names, or of the only one.

    *key* is the setting that the scope stands under, for messages; *fetch* gets a token in another way.
    """
    return EntraToken(
        fetch or partial(fetch_own_token, scope),
        source=f"Entra ID ({key})",
        advice="Check the scope, and that this VM has a managed identity.",
    )


def fetch_own_token(scope: str) -> AccessToken:
    """Return a new token of the identity that AZURE_CLIENT_ID names, or of the only one; who asks tries again."""
    client_id = os.environ.get("AZURE_CLIENT_ID") or None
    return fetch_token(scope, client_id=client_id, retry_total=0, connection_timeout=_READ_SECONDS)


def check_scope(scope: str) -> None:
    """Raise ValueError, with what is wanted, when *scope* is none."""
    if not scope or any(map(str.isspace, scope)):
        raise ValueError('one scope, such as "api://scheduled-events-portal/.default"')


def fetch_token(scope: str, *, client_id: str | None = None, is_default: bool = False, **options: Any) -> AccessToken:
    """Return a new token for *scope* from this machine's managed identity, or its workload identity in Kubernetes.

    *client_id* names one of several user-assigned identities. *is_default* asks the first credential that
    azure-identity finds instead. *options* go to azure-identity, whatever it raises is raised here, and nothing is
    cached: a token that the service refused must not come again.
    """
    with _credential(client_id=client_id, is_default=is_default, options=options) as credential:
        answer = credential.get_token(scope if scope.endswith("/.default") else f"{scope}/.default")
    return AccessToken(answer.token, int(answer.expires_on))


@contextmanager
def _credential(*, client_id: str | None, is_default: bool, options: dict[str, Any]) -> Iterator[Any]:
    from azure.core.pipeline.transport import RequestsTransport  # noqa: PLC0415  # 11 to 20 MB and a second, where used
    from azure.identity import DefaultAzureCredential, ManagedIdentityCredential  # noqa: PLC0415  # likewise

    # A proxy would ask with its own VM's identity; only workload identity goes out to a public address.
    uses_proxies = is_default or bool(os.environ.get("AZURE_FEDERATED_TOKEN_FILE"))
    with BoundedSession(trust_env=uses_proxies) as session:
        options = {"connection_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS, **options}
        # Not owned by the transport: the credentials of a chain share it, and each closes what it owns.
        options["transport"] = RequestsTransport(session=session, session_owner=False, **options)
        if is_default:
            made: Any = DefaultAzureCredential(managed_identity_client_id=client_id, **options)
        else:
            made = ManagedIdentityCredential(client_id=client_id, **options)
        with made as credential:
            yield credential
