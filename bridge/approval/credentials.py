"""Credentials for the portal: the bearer token, from a file, the environment, Entra ID or the portal itself.

A token never stands in a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from bridge.config.approval import RemoteSettings
from bridge.errors import CredentialFailed, SecretUnavailable
from bridge.system.access_tokens import AccessToken, RenewedToken, fetch_own_token, token_of
from bridge.system.secrets import Secret

#: How long a request waits for a token that is not there yet.
TOKEN_DEADLINE_SECONDS = 10.0

_KEY = "approval.remote.token"


class PortalCredential(Protocol):
    """Where the bearer token comes from."""

    def bearer(self) -> str | None:
        """Return the token, None when none is wanted; raise CredentialFailed when it cannot be had."""

    def forget(self) -> bool:
        """Get the token anew for the next request: the portal refused the one it was shown.

        Return whether that is all there is to do for now: another token will be shown, and nobody need act.
        """

    def close(self) -> None:
        """Wait for nothing any more."""


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
        except SecretUnavailable as error:
            raise CredentialFailed(str(error), needs_attention=True) from error
        if token is not None and not _is_sendable(token):
            raise CredentialFailed(
                f"The secret of {_KEY} has characters that no bearer token has (RFC 6750 section 2.1). "
                "Put the token there, and nothing else.",
                needs_attention=True,
            )
        return token

    def forget(self) -> bool:
        """Read the file again, also when its time and size are the same."""
        self._secret = self._unread()
        return False

    def close(self) -> None:
        """Nothing waits here."""

    def _unread(self) -> Secret:
        return Secret(key=_KEY, file=self._file, env=self._env, environ=self._environ)


class EntraCredential:
    """The managed identity's token for *scope*; *fetch* gets one, and may hang: *deadline_seconds* bounds the wait."""

    def __init__(
        self,
        scope: str,
        *,
        fetch: Callable[[], AccessToken] | None = None,
        deadline_seconds: float = TOKEN_DEADLINE_SECONDS,
    ) -> None:
        self._deadline_seconds = deadline_seconds
        fetch = fetch or partial(fetch_portal_token, scope)
        self._token: RenewedToken = token_of(scope, key="approval.remote.entra_scope", fetch=fetch)

    def bearer(self) -> str:
        """Return a token that is good for now; one that still counts, when no newer can be had."""
        return self._token.current(wait_seconds=self._deadline_seconds).token

    def forget(self) -> bool:
        """Ask Entra ID again."""
        self._token.forget()
        return False

    def close(self) -> None:
        """Break off the wait."""
        self._token.close()


class AttestedCredential:
    """The portal's own *token* for this VM; nobody waits for one longer than *deadline_seconds*."""

    def __init__(self, token: RenewedToken, *, deadline_seconds: float = TOKEN_DEADLINE_SECONDS) -> None:
        self._token = token
        self._deadline_seconds = deadline_seconds
        self._shown: AccessToken | None = None

    def bearer(self) -> str:
        """Return a token that is good for now; one that still counts, when no newer can be had."""
        self._shown = self._token.current(wait_seconds=self._deadline_seconds)
        return self._shown.token

    def forget(self) -> bool:
        """Get another, but not for each refusal: one that came in place of a refused one stays for five minutes."""
        return self._shown is not None and self._token.refuse(self._shown)

    def close(self) -> None:
        """Break off the wait, and ask for nothing any more."""
        self._token.close()


def fetch_portal_token(scope: str) -> AccessToken:
    """Return a new token of the identity that AZURE_CLIENT_ID names, or of the only one; the portal is asked again."""
    return fetch_own_token(scope)


def _is_sendable(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token
