"""Provides the bearer token for the portal. Error messages never contain a token.

The token comes from a file, an environment variable, Entra ID, or the portal itself.
"""

from __future__ import annotations

from bridge.config.approval import RemoteSettings
from bridge.errors import CredentialFailed, SecretUnavailable
from bridge.system.access_tokens import AccessToken, RenewedToken, token_of
from bridge.system.secrets import Secret

TOKEN_DEADLINE_SECONDS = 10.0

_KEY = "approval.remote.token"


def secret_token(remote: RemoteSettings) -> str | None:
    """Return the token in a file or a variable, or None if *remote* names neither.

    Raises CredentialFailed if the token cannot be read or is not a valid bearer token.
    """
    try:
        token = Secret(key=_KEY, file=remote.token_file, env=remote.token_env).value()
    except SecretUnavailable as error:
        raise CredentialFailed(str(error), needs_attention=True) from error
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise CredentialFailed(
            f"The secret of {_KEY} contains characters that a bearer token cannot have (RFC 6750 section 2.1). "
            "The file or the variable must contain only the token.",
            needs_attention=True,
        )
    return token


class PortalCredential:
    """Provides the token for the portal.

    The token comes from *renewed* if it is not None, and otherwise from Entra ID or the secret of *remote*.
    """

    def __init__(self, remote: RemoteSettings, renewed: RenewedToken | None = None) -> None:
        if renewed is None and remote.entra_scope is not None:
            renewed = token_of(remote.entra_scope, key="approval.remote.entra_scope")
        self._remote = remote
        self._renewed = renewed
        self._shown: AccessToken | None = None

    def bearer(self) -> str | None:
        """Return a valid token, or None if no token is configured. Raises CredentialFailed."""
        if self._renewed is None:
            return secret_token(self._remote)
        self._shown = self._renewed.current(wait_seconds=TOKEN_DEADLINE_SECONDS)
        return self._shown.token

    def refuse(self) -> bool:
        """Discard the refused token, but at most once in five minutes.

        Return whether the next request uses another token.
        """
        return self._renewed is not None and self._shown is not None and self._renewed.refuse(self._shown)

    def close(self) -> None:
        """Cancel the current wait for a token, and request no more tokens."""
        if self._renewed is not None:
            self._renewed.close()
