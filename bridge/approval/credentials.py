"""Provides the bearer token for the portal. Error messages never contain a token.

The token comes from a file, an environment variable, Entra ID, or the portal itself.
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
    """Reads the token from an environment variable or a file. Rereads a file that has changed."""

    def __init__(
        self, *, file: str | None = None, env: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._file, self._env, self._environ = file, env, environ
        self._secret = self._unread()

    def bearer(self) -> str | None:
        """Return the current token, or None if no token is configured. Raises CredentialFailed."""
        try:
            token = self._secret.value()
        except SecretUnavailable as error:
            raise CredentialFailed(str(error), needs_attention=True) from error
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise CredentialFailed(
                f"The secret of {_KEY} contains characters that a bearer token cannot have (RFC 6750 section 2.1). "
                "The file or the variable must contain only the token.",
                needs_attention=True,
            )
        return token

    def forget(self) -> bool:
        """Reread the file before the next request.

        The method returns False, because the file might still contain the same token.
        """
        self._secret = self._unread()
        return False

    def close(self) -> None:
        """Do nothing."""

    def _unread(self) -> Secret:
        return Secret(key=_KEY, file=self._file, env=self._env, environ=self._environ)


class RenewedCredential:
    """Requests a token from Entra ID or the portal, and renews the token before it expires."""

    def __init__(self, token: RenewedToken) -> None:
        self._token = token
        self._shown: AccessToken | None = None

    def bearer(self) -> str:
        """Return a valid token. Raises CredentialFailed if it gets no token within ten seconds."""
        self._shown = self._token.current(wait_seconds=TOKEN_DEADLINE_SECONDS)
        return self._shown.token

    def forget(self) -> bool:
        """Discard the refused token, but at most once in five minutes.

        Return whether the next request uses another token.
        """
        return self._shown is not None and self._token.refuse(self._shown)

    def close(self) -> None:
        """Cancel the current wait for a token, and request no more tokens."""
        self._token.close()


PortalCredential = SecretCredential | RenewedCredential


def credential_of(remote: RemoteSettings) -> PortalCredential:
    """Return the credential of *remote*. For attested tokens, see `PortalClient`."""
    if remote.entra_scope is not None:
        return RenewedCredential(token_of(remote.entra_scope, key="approval.remote.entra_scope"))
    return SecretCredential(file=remote.token_file, env=remote.token_env)
