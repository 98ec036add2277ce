"""Credentials for the portal: the bearer token from a file, the environment, Entra ID, or the portal itself.

No message contains a token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from bridge.config.approval import RemoteSettings
from bridge.errors import CredentialFailed, SecretUnavailable
from bridge.system.access_tokens import AccessToken, RenewedToken, token_of
from bridge.system.secrets import Secret

TOKEN_DEADLINE_SECONDS = 10.0

_KEY = "approval.remote.token"


class SecretCredential:
    """The token of a file, which is read again when it changes, or of an environment variable, or no token."""

    def __init__(
        self, *, file: str | None = None, env: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._file, self._env, self._environ = file, env, environ
        self._secret = self._unread()

    def bearer(self) -> str | None:
        """Return the current token."""
        try:
            token = self._secret.value()
        except SecretUnavailable as error:
            raise CredentialFailed(str(error), needs_attention=True) from error
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise CredentialFailed(
                f"The secret of {_KEY} has characters that no bearer token has (RFC 6750 section 2.1). "
                "Put the token there, and nothing else.",
                needs_attention=True,
            )
        return token

    def forget(self) -> bool:
        """Read the file again even if its time and size did not change. Return False, because the token is the same."""
        self._secret = self._unread()
        return False

    def close(self) -> None:
        """Do nothing."""

    def _unread(self) -> Secret:
        return Secret(key=_KEY, file=self._file, env=self._env, environ=self._environ)


class RenewedCredential:
    """The *token* of Entra ID or of the portal. A request waits at most *deadline_seconds* for a token."""

    def __init__(self, token: RenewedToken, *, deadline_seconds: float = TOKEN_DEADLINE_SECONDS) -> None:
        self._token = token
        self._deadline_seconds = deadline_seconds
        self._shown: AccessToken | None = None

    def bearer(self) -> str:
        """Return a valid token; the last one if no newer token is available."""
        self._shown = self._token.current(wait_seconds=self._deadline_seconds)
        return self._shown.token

    def forget(self) -> bool:
        """Get another token, because the portal refused the last one; return whether the next request uses it.

        A token that replaced a refused token is kept for five minutes.
        """
        return self._shown is not None and self._token.refuse(self._shown)

    def close(self) -> None:
        """Cancel the wait, and request no more tokens."""
        self._token.close()


PortalCredential = SecretCredential | RenewedCredential


def credential_of(remote: RemoteSettings) -> PortalCredential:
    """Return the credential that *remote* configures, except for attested tokens (`bridge.approval.portal_client`)."""
    if remote.entra_scope is not None:
        return RenewedCredential(token_of(remote.entra_scope, key="approval.remote.entra_scope"))
    return SecretCredential(file=remote.token_file, env=remote.token_env)
