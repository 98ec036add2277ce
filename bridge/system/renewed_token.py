"""RenewedToken: an access token that is fetched aside, and renewed before it expires.

Nobody waits for a token while an older one is still good: when some of its life is over the next is fetched on a thread
of its own. When there is none the caller waits within its own deadline; a fetch that outlives that goes on, and what it
brings late is used. What fetches may wait for an endpoint without an end that could be relied on, and may wait on after
that is well again: so who needs a token may ask once more beside a fetch that is silent. Few are under way at a time:
an endpoint that stays silent shall cost a few threads, not one a try.

A token never stands in a message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import CredentialFailed
from bridge.system.threads import run_daemon
from bridge.text import EXCERPT_CHARACTERS, one_line

#: A token with less than this left is used only when no newer can be had: the service's clock may be ahead of ours.
_LEAST_SECONDS = 60.0
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


class RenewedToken:
    """The token that *fetch* gets, which may hang or raise anything.

    *source* is what messages call who gives it, *advice* what a person can do when it gives none, *silence* what to
    think of when it says nothing. A fetch is waited for alone no longer than *patience_seconds*, and no more than
    *most_fetches* are under way. A new token is fetched when *renewed_after* of the life of the last is over.
    """

    def __init__(
        self,
        fetch: Callable[[], AccessToken],
        *,
        source: str,
        advice: str,
        clock: Clock = REAL_CLOCK,
        patience_seconds: float = _PATIENCE_SECONDS,
        most_fetches: int = _MOST_FETCHES,
        renewed_after: float = 0.5,
        silence: str = "Does the identity endpoint answer?",
        thread_name: str = "token",
    ) -> None:
        self._fetch = fetch
        self._source = source
        self._advice = advice
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._most_fetches = most_fetches
        self._renewed_after = renewed_after
        self._silence = silence
        self._thread_name = thread_name
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

    def refuse(self, token: AccessToken) -> bool:
        """Drop *token*, which the service has refused; one that came in its place stays for five minutes.

        Return whether another one is shown next.
        """
        now = self._clock.monotonic()
        if token == self._token and now - self._refused_at >= _REPLACEMENT_SECONDS:
            self._refused_at = now
            self.forget()
        return token != self._token

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
            if not under_way or (is_late and len(under_way) < self._most_fetches):
                self._renew_at = self._clock.timestamp() + _RETRY_SECONDS  # should this fetch fail
                self._began_at = self._clock.monotonic()
                under_way.append(run_daemon(self._thread_name, self._fetched))
            self._fetching = under_way
            return under_way.copy()

    def _fetched(self) -> AccessToken:
        token = self._fetch()
        now = self._clock.timestamp()
        self._renew_at = now + max(_RETRY_SECONDS, (token.expires_on - now) * self._renewed_after)
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
                    f"{self._source} gave no token within {seconds:.2g} s. {self._silence}",
                    needs_attention=False,
                )

    def _failed(self, error: BaseException) -> CredentialFailed:
        if isinstance(error, CredentialFailed):
            return error  # a sentence of ours, made for people
        # What follows the first line differs from try to try, and would make a log line of each.
        reason = str(error).strip().partition("\n")[0].partition(" Trace ID:")[0]
        return CredentialFailed(
            f"{self._source} gave no token: {one_line(reason, EXCERPT_CHARACTERS)} {self._advice}",
            needs_attention=True,
        )
