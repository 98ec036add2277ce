"""URLs that requests go to: whether one can be used, what a message may show of it, and what of it may be secret."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

#: A shorter part of a path is a word like "hook", which says nothing.
_SHORTEST_SECRET = 6
#: Paths that a protocol prescribes: what stands before one may be a secret, the path itself is in every manual.
_PRESCRIBED = ("/v1/logs", "/v1/traces", "/api/v2/alerts", "/api/v2/status", "/v2/enqueue", "/v2/change/enqueue")


def http_url(url: str, *, key: str) -> SplitResult:
    """Return the parts of *url*; raise ValueError, which never shows it, when no request can go there."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isprintable() or any(character.isspace() for character in url):
        raise ValueError(f"{key} must be a URL such as https://example.net/hook, without blanks.")
    return parts


def plain_url(url: str, *, key: str) -> SplitResult:
    """Return the parts of *url* from the configuration, where no password may stand."""
    parts = http_url(url, key=key)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{key} holds a user name or a password. Put the whole URL into {key}_file or {key}_env.")
    return parts


def origin(url: str) -> str:
    """Return scheme, host and port of *url*: all that a message may show."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "<a URL>"
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port else "")


def url_secrets(url: str) -> Iterator[str]:
    """Yield what may be secret of *url*: all but scheme, host and port, whole and in parts, and as it is sent."""
    parts = urlsplit(url)
    parts = parts._replace(path=_own_path(parts.path))
    has_more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    yield from (url if has_more else "", parts.path, parts.query, parts.username or "", parts.password or "")
    yield from (unquote(parts.username or ""), unquote(parts.password or ""), unquote(parts.path))
    if "@" in parts.netloc:
        yield from _basic(unquote(parts.username or ""), unquote(parts.password or ""))
    yield from (value for _, value in parse_qsl(parts.query))
    yield from (segment for segment in parts.path.split("/") if len(segment) >= _SHORTEST_SECRET)


def public_path(url: str) -> str:
    """Return the path of *url* when a protocol prescribes all of it; empty when some of it is the user's own."""
    try:
        path = urlsplit(url).path
    except ValueError:
        return ""
    return path if path in _PRESCRIBED else ""


def _own_path(path: str) -> str:
    """Return *path* without what a protocol prescribes of it."""
    return next((path.removesuffix(each) for each in _PRESCRIBED if path.endswith(each)), path)


def _basic(user: str, password: str) -> Iterator[str]:
    """Yield what Authorization and Proxy-Authorization make of a user and a password (RFC 7617 section 2)."""
    pair = f"{user}:{password}"
    yield pair
    for charset in ("latin-1", "utf-8"):  # requests writes the former
        yield base64.b64encode(pair.encode(charset, "replace")).decode("ascii")
