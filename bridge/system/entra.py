"""EntraToken: the Microsoft Entra ID access token of this machine's identity (see `bridge.system.renewed_token`).

A token never stands in a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bridge.http.session import BoundedSession
from bridge.system.renewed_token import AccessToken, RenewedToken

#: azure-core waits 300 s for an answer unless told otherwise.
_READ_SECONDS = 10.0
_CONNECT_SECONDS = 5.0


class EntraToken(RenewedToken):
    """The token that *fetch* gets of Entra ID, renewed at half of its life."""


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
