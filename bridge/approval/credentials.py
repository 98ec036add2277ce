"""Reads the bearer token for the portal from a file or a variable.

Error messages never contain a token.
"""

from __future__ import annotations

from bridge.config.approval import RemoteSettings
from bridge.errors import CredentialFailed, SecretUnavailable
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
