"""Microsoft Entra ID tokens for Event Hubs, fetched aside and before they expire.

A send never waits for a token while an older one is still good: from half of its life on the next is fetched on a
thread of its own. When there is none, the send waits for the fetch within its own deadline; a fetch that outlives that
goes on, and its token is there for the next try. One fetch at a time, so a metadata service that stays silent costs
one thread, not one a try.

The credentials are azure-identity's synchronous ones: the asynchronous ones need aiohttp.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from bridge.sink import DeliveryFailed

SCOPE = "https://eventhubs.azure.net/.default"

#: A token with less than this left is not used: the service's clock may be ahead of this one.
_LEAST_SECONDS = 60.0
#: azure-core waits 300 s for an answer unless told otherwise.
_READ_SECONDS = 10.0
_RETRY_SECONDS = 5.0


class Token(NamedTuple):
    """A token and when it expires, in seconds since 1970; named as azure-core's AccessToken is."""

    token: str
    expires_on: int


class Tokens:
    """The token of one credential; *fetch* gets a new one and may take its time."""

    def __init__(self, fetch: Callable[[], Token], *, clock: Callable[[], float] = time.time) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._token: Token | None = None
        self._renew_at = 0.0
        self._fetching: Future[Token] | None = None

    def current(self, *, wait_seconds: float) -> Token:
        """Return a token that is good for now; raise DeliveryFailed when there is none within *wait_seconds*."""
        token = self.good()
        if token is not None and self._clock() < self._renew_at:
            return token
        future = self._begin()
        if token is not None:
            return token
        wait({future}, wait_seconds)
        if not future.done():
            raise DeliveryFailed(
                f"The credential gave no token within {wait_seconds:.2g} s. Does the identity endpoint answer?"
            )
        error = future.exception()
        if error is not None:
            raise _failure(error) from error
        return future.result()

    def good(self) -> Token | None:
        """Return the token at hand unless it is about to expire."""
        token = self._token
        return token if token is not None and token.expires_on - self._clock() > _LEAST_SECONDS else None

    def forget(self) -> None:
        """Drop the token: the service has refused it."""
        self._token = None

    def _begin(self) -> Future[Token]:
        """Return the fetch under way; begin one if there is none."""
        with self._lock:
            if self._fetching is None or self._fetching.done():
                self._renew_at = self._clock() + _RETRY_SECONDS  # should this fetch fail
                self._fetching = Future()
                threading.Thread(target=self._run, args=(self._fetching,), name="eventhubs:token", daemon=True).start()
            return self._fetching

    def _run(self, future: Future[Token]) -> None:
        try:
            token = self._fetch()
        except BaseException as error:  # noqa: BLE001  # handed to whoever waits
            future.set_exception(error)
            return
        now = self._clock()
        self._renew_at = now + max(_RETRY_SECONDS, (token.expires_on - now) / 2)
        self._token = token
        future.set_result(token)


def identity_tokens(*, is_default: bool, client_id: str | None) -> Tokens:
    """Return the tokens of the managed identity, or of the first credential that azure-identity finds."""
    built: list[Any] = []

    def fetch() -> Token:
        if not built:
            built.append(_credential(is_default=is_default, client_id=client_id))
        found = built[0].get_token(SCOPE)
        return Token(found.token, int(found.expires_on))

    return Tokens(fetch)


def _credential(*, is_default: bool, client_id: str | None) -> Any:
    if is_default:
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415  # 11 to 14 MB, only where it is used

        return DefaultAzureCredential(managed_identity_client_id=client_id, read_timeout=_READ_SECONDS)
    from azure.identity import ManagedIdentityCredential  # noqa: PLC0415  # likewise

    # A proxy would ask with its own VM's identity; only workload identity goes out to a public address.
    uses_proxies = bool(os.environ.get("AZURE_FEDERATED_TOKEN_FILE"))
    return ManagedIdentityCredential(client_id=client_id, read_timeout=_READ_SECONDS, use_env_settings=uses_proxies)


def _failure(error: BaseException) -> DeliveryFailed:
    said = " ".join(str(error).split())[:256]
    return DeliveryFailed(
        f"The credential gave no token: {said} Assign the identity, or set client_id to one that is assigned.",
        needs_attention=True,
    )
