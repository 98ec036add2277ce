"""Who the agent says it is at the portal: the bearer token, from a file, the environment or Entra ID.

Entra ID is asked on a thread of its own. Its library waits for a token endpoint without an end that could be relied
on, and a metadata service that hangs must hold neither the channel nor a process that wants to exit. One such thread
at most: while it hangs, no other is started, and what it brings late is still used.

A token never stands in a message.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from bridge.config.approval import RemoteSettings
from bridge.errors import CredentialFailed, DeliveryFailed
from bridge.system.secrets import Secret
from bridge.text import EXCERPT_CHARACTERS, one_line

ENTRA_DEADLINE_SECONDS = 10.0
#: So long before it expires a token is replaced; or at half its life, when that is short.
RENEW_SECONDS = 300.0

_KEY = "approval.remote.token"


class PortalCredential(Protocol):
    """Where the bearer token comes from."""

    def bearer(self) -> str | None:
        """Return the token, null when none is wanted; raise CredentialFailed when it cannot be had."""

    def forget(self) -> None:
        """Get the token anew for the next request: the portal refused the one it was shown."""

    def close(self) -> None:
        """Wait for nothing any more."""


class EntraToken(NamedTuple):
    """An access token and the Unix time at which it expires."""

    token: str
    expires_at: float


def credential_of(remote: RemoteSettings) -> PortalCredential:
    """Return what *remote* configures."""
    if remote.entra_scope is not None:
        return EntraCredential(remote.entra_scope)
    return SecretCredential(file=remote.token_file, env=remote.token_env)


class SecretCredential:
    """The token of a file, read again when it changes, or of an environment variable; or none at all."""

    def __init__(
        self, *, file: str | None = None, env: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._file, self._env, self._environ = file, env, environ
        self._secret = self._unread()

    def bearer(self) -> str | None:
        """Return the token as it is now."""
        try:
            token = self._secret.value()
        except DeliveryFailed as error:
            raise CredentialFailed(str(error), needs_attention=True) from error
        if token is not None and not _is_sendable(token):
            raise CredentialFailed(
                f"The secret of {_KEY} has characters that no bearer token has (RFC 6750 section 2.1). "
                "Put the token there, and nothing else.",
                needs_attention=True,
            )
        return token

    def forget(self) -> None:
        """Read the file again, whether or not it looks changed."""
        self._secret = self._unread()

    def close(self) -> None:
        """Nothing waits here."""

    def _unread(self) -> Secret:
        return Secret(key=_KEY, file=self._file, env=self._env, environ=self._environ)


class EntraCredential:
    """The managed identity's token for *scope*, kept until five minutes before it expires.

    *fetch* gets one, and may hang; it is given up after *deadline_seconds*. *clock* gives Unix time.
    """

    def __init__(
        self,
        scope: str,
        *,
        fetch: Callable[[str], EntraToken] | None = None,
        deadline_seconds: float = ENTRA_DEADLINE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scope = scope
        self._fetch = fetch or fetch_entra_token
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._held: EntraToken | None = None
        self._renew_at = 0.0
        self._running: Future[EntraToken] | None = None
        self._woken = threading.Event()
        self._is_closed = False

    def bearer(self) -> str:
        """Return a token that is good for a while yet; one that still counts, when no newer can be had."""
        held = self._held
        if held is not None and self._clock() < self._renew_at:
            return held.token
        try:
            fresh = self._fetched()
        except CredentialFailed:
            if held is None or self._clock() >= held.expires_at:
                raise
            return held.token
        life_seconds = fresh.expires_at - self._clock()
        self._held, self._renew_at = fresh, fresh.expires_at - min(RENEW_SECONDS, life_seconds / 2)
        return fresh.token

    def forget(self) -> None:
        """Ask Entra ID again."""
        self._held = None

    def close(self) -> None:
        """Break off the wait; the thread that asks ends when its own time is over."""
        self._is_closed = True
        self._woken.set()

    def _fetched(self) -> EntraToken:
        running = self._running
        if running is None:
            running = self._running = Future()
            self._woken.clear()
            running.add_done_callback(lambda _: self._woken.set())
            threading.Thread(target=self._ask, args=(running,), name="entra-token", daemon=True).start()
        if not self._is_closed:
            self._woken.wait(self._deadline_seconds)
        if not running.done():
            raise CredentialFailed(
                f"Entra ID gave no token for approval.remote.entra_scope within {self._deadline_seconds:g} s.",
                needs_attention=False,
            )
        self._running = None
        return running.result()

    def _ask(self, answer: Future[EntraToken]) -> None:
        try:
            answer.set_result(self._fetch(self._scope))
        except CredentialFailed as error:
            answer.set_exception(error)
        except Exception as error:  # noqa: BLE001 - the top of a thread; its library raises what it likes
            answer.set_exception(_unavailable(error))


def fetch_entra_token(scope: str) -> EntraToken:
    """Return a new token for *scope* from this machine's managed identity, or its workload identity in Kubernetes.

    Several user-assigned identities: AZURE_CLIENT_ID names the one. Raises what azure-identity raises, and caches
    nothing: a token that the portal refused must not come again.
    """
    from azure.identity import ManagedIdentityCredential  # noqa: PLC0415 - a second and 20 MB, for those who ask

    # A proxy would ask with its own VM's identity; only workload identity goes out to a public address.
    uses_proxies = bool(os.environ.get("AZURE_FEDERATED_TOKEN_FILE"))
    with ManagedIdentityCredential(
        client_id=os.environ.get("AZURE_CLIENT_ID") or None,
        retry_total=0,
        connection_timeout=ENTRA_DEADLINE_SECONDS,
        read_timeout=ENTRA_DEADLINE_SECONDS,
        use_env_settings=uses_proxies,
    ) as credential:
        answer = credential.get_token(scope if scope.endswith("/.default") else f"{scope}/.default")
    return EntraToken(answer.token, float(answer.expires_on))


def _unavailable(error: Exception) -> CredentialFailed:
    # What follows differs from try to try, and would make a log line of each.
    said = str(error).strip().partition("\n")[0].partition(" Trace ID:")[0]
    failed = CredentialFailed(
        f"Entra ID gave no token for approval.remote.entra_scope: {one_line(said, EXCERPT_CHARACTERS)} "
        "Check the scope, and that this VM has a managed identity.",
        needs_attention=True,
    )
    failed.__cause__ = error
    return failed


def _is_sendable(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token
