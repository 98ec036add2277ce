"""Validates URLs and finds the parts of a URL that can be secret."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

#: A shorter segment of a path is an ordinary word, such as "hook".
_SHORTEST_SECRET = 6


def http_url(url: str, *, key: str) -> SplitResult:
    """Return the parts of *url*. Raise ValueError, without quoting *url*, if it is invalid."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isprintable() or any(character.isspace() for character in url):
        raise ValueError(
            f"{key} must be a URL such as https://example.net/hook, without spaces and with a port from 1 to 65535."
        )
    return parts


def check_plain_url(url: str, *, key: str) -> None:
    """Raise ValueError if *url* is invalid or contains a password."""
    parts = http_url(url, key=key)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{key} contains a user name or a password. Put the whole URL into {key}_file or {key}_env.")


def check_proxy_url(url: str) -> None:
    """Raise ValueError unless *url* is the URL of an HTTP proxy."""
    if http_url(url, key="proxy").scheme != "http":
        raise ValueError("proxy must be a URL such as http://proxy:3128. Proxies over TLS are not supported.")


def origin(url: str) -> str:
    """Return the scheme, the host, and the port of *url*, which messages can contain."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "<a URL>"
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port else "")


def url_secrets(url: str) -> Iterator[str]:
    """Yield the parts of *url* that can be secret: all except scheme, host, and port."""
    parts = urlsplit(url)
    has_more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    yield from (url if has_more else "", parts.path, parts.query, parts.username or "", parts.password or "")
    yield from (unquote(parts.username or ""), unquote(parts.password or ""), unquote(parts.path))
    if "@" in parts.netloc:
        yield from _basic(unquote(parts.username or ""), unquote(parts.password or ""))
    yield from (value for _, value in parse_qsl(parts.query))
    yield from (segment for segment in parts.path.split("/") if len(segment) >= _SHORTEST_SECRET)


def _basic(user: str, password: str) -> Iterator[str]:
    """Yield a user name and password in each form that an HTTP header uses (RFC 7617)."""
    pair = f"{user}:{password}"
    yield pair
    for charset in ("latin-1", "utf-8"):  # `Target` writes the former
        yield base64.b64encode(pair.encode(charset, "replace")).decode("ascii")
