"""Creates the connection and the request target for one URL, with or without a proxy."""

from __future__ import annotations

import base64
import functools
import ssl
from collections.abc import Callable
from urllib.parse import SplitResult, quote, unquote, urlsplit

import certifi

from bridge.sink import DeadlineConnection, DeliveryFailed, Secret
from sinks.http.config import HttpConfig, ServerConfig
from sinks.http.urls import check_proxy_url

_PORTS = {"http": 80, "https": 443}
#: Characters that are not escaped in a path or a query. Existing escapes are kept (RFC 3986).
_KEPT = "!#$%&'()*+,/:;=?@[]~"


class Target:
    """The URL to which an endpoint sends its requests."""

    def __init__(self, url: str) -> None:
        self._parts = parts = urlsplit(url)
        self.is_https = parts.scheme == "https"
        path = quote(parts.path or "/", safe=_KEPT)
        self.path = f"{path}?{quote(parts.query, safe=_KEPT)}" if parts.query else path
        authority = parts.netloc.rpartition("@")[2]
        self.absolute = f"{parts.scheme}://{authority}{self.path}"
        """The request target for a proxy that forwards the request."""
        self.headers = _basic("Authorization", parts)

    def connection(self, proxy: str | None, *, tls: Callable[[], ssl.SSLContext]) -> DeadlineConnection:
        """Return a new connection, through *proxy* unless *proxy* is None."""
        through = None if proxy is None else urlsplit(proxy)
        return DeadlineConnection(
            *_address(self._parts),
            tls=tls if self.is_https else None,
            proxy=None if through is None else _address(through),
            proxy_headers=None if through is None else _basic("Proxy-Authorization", through),
        )


class Proxy:
    """The proxy that a sink uses. Its address can change while the agent is running."""

    def __init__(self, config: ServerConfig) -> None:
        self._url = config.proxy
        self.secret = Secret(key="proxy", file=config.proxy_file, env=config.proxy_env)

    def url(self) -> str | None:
        """Return the current URL, or None. Raise DeliveryFailed if the URL is invalid."""
        url = self._url or self.secret.value()
        if url is not None:
            try:
                check_proxy_url(url)
            except ValueError as error:
                raise DeliveryFailed(f"The proxy's URL cannot be used: {error}", needs_attention=True) from None
        return url


def tls_context(config: HttpConfig) -> ssl.SSLContext:
    """Return the TLS context of a new connection. Raise ValueError if a file cannot be used.

    The certificate files are read for each connection, because certificates can be renewed while the agent is running.
    """
    if config.ca_file is None and config.client_cert_file is None:
        return _default_context()
    try:
        context = ssl.create_default_context(cafile=config.ca_file or certifi.where())
        if config.client_cert_file is not None:
            context.load_cert_chain(config.client_cert_file, config.client_key_file)
    except OSError as error:  # an SSLError is an OSError
        raise ValueError(f"ca_file, client_cert_file, or client_key_file cannot be used: {error}") from error
    return context


@functools.cache
def _default_context() -> ssl.SSLContext:
    """Return the context that all connections share, because each context takes 2 MB."""
    return ssl.create_default_context(cafile=certifi.where())


def _address(parts: SplitResult) -> tuple[str, int]:
    return parts.hostname or "", parts.port or _PORTS[parts.scheme]


def _basic(name: str, parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode("latin-1", "replace")
    return {name: f"Basic {base64.b64encode(pair).decode()}"}
