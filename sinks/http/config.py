"""The settings that all HTTP sinks share.

Error messages do not contain values that can be secret, such as a webhook URL's path, a header, or a proxy password.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from bridge.sink import SinkConfig, check_scope, is_loopback, tls_file_problems
from sinks.http.urls import check_plain_url, check_proxy_url

#: A field name is a token (RFC 9110 section 5.1).
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: Headers that frame a message. Two lengths allow request smuggling (RFC 9112 section 6.3).
_OURS = frozenset({"content-length", "transfer-encoding", "connection", "expect", "upgrade", "te", "trailer"})
_Status = Annotated[int, msgspec.Meta(ge=100, le=599)]


class ServerConfig(SinkConfig, frozen=True, kw_only=True):
    """The settings of the certificates and the proxy of a server."""

    ca_file: str | None = None
    """A PEM file with the certificate authorities to trust instead of the default authorities (certifi)."""
    proxy: str | None = None
    """URL of an HTTP proxy. The agent ignores proxies in environment variables."""
    proxy_file: str | None = None
    """A file with the proxy's URL, for a URL with a password. The agent rereads the file when it changes."""
    proxy_env: str | None = None
    """An environment variable with the proxy's URL, for a URL with a password."""

    def __post_init__(self) -> None:
        one_of(proxy=self.proxy, proxy_file=self.proxy_file, proxy_env=self.proxy_env)
        if self.proxy is not None:
            check_plain_url(self.proxy, key="proxy")
            check_proxy_url(self.proxy)
        check_tls_files(ca_file=self.ca_file)

    @property
    def has_proxy(self) -> bool:
        """Return whether requests go through a proxy."""
        return any(each is not None for each in (self.proxy, self.proxy_file, self.proxy_env))


class HttpConfig(ServerConfig, frozen=True, kw_only=True):
    """The settings that all HTTP sinks share."""

    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Headers to send with every request. Put secrets into headers_file."""
    headers_file: str | None = None
    """A file with more headers, one `Name: value` per line. The agent rereads the file when it changes."""
    bearer_token_file: str | None = None
    """A file with the token for `Authorization: Bearer`. The agent rereads the file when it changes."""
    bearer_token_env: str | None = None
    """An environment variable with the token for `Authorization: Bearer`."""
    entra_scope: str | None = None
    """Get the bearer token for this scope from Entra ID as the VM's managed identity. If the VM has several identities,
    AZURE_CLIENT_ID selects the identity."""
    client_cert_file: str | None = None
    """A PEM file with the client certificate. If client_key_file is not set, the file also contains the key."""
    client_key_file: str | None = None
    """A PEM file with the unencrypted key of the client certificate."""
    retry_statuses: tuple[_Status, ...] = ()
    """HTTP statuses to retry. This setting overrides the default handling."""
    park_statuses: tuple[_Status, ...] = ()
    """HTTP statuses that reject a record permanently. This setting overrides the default handling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ValueError("client_key_file needs client_cert_file.")
        check_tls_files(client_cert_file=self.client_cert_file, client_key_file=self.client_key_file)
        one_of(**self._ways())
        self._check_scope()
        for name, value in self.headers.items():
            check_header(name, value, where="headers")

    @property
    def token_key(self) -> str | None:
        """Return the name of the setting that requests a token for each request, or None."""
        return None if self.entra_scope is None else "entra_scope"

    def _ways(self) -> dict[str, str | None]:
        return {
            "bearer_token_file": self.bearer_token_file,
            "bearer_token_env": self.bearer_token_env,
            "entra_scope": self.entra_scope,
        }

    def _check_scope(self) -> None:
        if self.entra_scope is not None:
            try:
                check_scope(self.entra_scope)
            except ValueError as wanted:
                raise ValueError(f"entra_scope must be {wanted}.") from None
        if self.token_key is not None and any(name.lower() == "authorization" for name in self.headers):
            raise ValueError(f"headers and {self.token_key} both set Authorization. Remove one of them.")


def one_of(**keys: str | None) -> None:
    """Raise ValueError if more than one of *keys* is set."""
    given = [name for name, value in keys.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both set. Remove one.")


def check_tls_files(**files: str | None) -> None:
    """Raise ValueError if a file is missing or contains an encrypted key."""
    for key, problem in tls_file_problems(**files):
        raise ValueError(f"{key}: {problem}")


def check_token_stays_private(config: HttpConfig, url: str) -> None:
    """Raise ValueError if the sink would send a token to *url* without encryption."""
    if config.token_key is not None:
        parts = urlsplit(url)
        if parts.scheme != "https" and (config.has_proxy or not is_loopback(parts.hostname or "")):
            reader = "the proxy" if config.has_proxy else "the network"
            raise ValueError(
                f"{config.token_key} needs an https URL, because {reader} can read a token over plain http."
            )


def check_header(name: str, value: str, *, where: str) -> None:
    """Raise ValueError if a header is invalid. The error message does not contain *value*."""
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"{where}: the name of a header is empty or has an invalid character.")
    if name.lower() in _OURS:
        raise ValueError(f"{where}: the sink sets the header {name}. Remove the header.")
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ValueError(f"{where}: the value of {name} must be printable ASCII without spaces at either end.")
