"""What a failed request means, and which parts of its URL are secrets.

requests and urllib3 wrap the reason in texts that hold the whole URL, several layers deep; what counts is which
exceptions are among the causes.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote, urlsplit

import requests

from bridge.sink import causes, root_cause

#: A shorter part of a URL is a word like "hook", which says nothing.
_SHORTEST_TOKEN = 6
#: The peer hung up under TLS: a broken connection, no quarrel about certificates.
_BROKEN_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError)
#: urllib3's names for what happens before a request can be sent.
_UNCONNECTED = frozenset({"NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError"})


def never_sent(error: BaseException) -> bool:
    """Return whether no byte of the request can have reached the peer: no name, no connection, no trust."""
    names = {type(each).__name__ for each in causes(error)}
    return bool(names & _UNCONNECTED) or isinstance(root_cause(error), ssl.SSLCertVerificationError)


def is_about_settings(error: BaseException) -> bool:
    """Return whether the request could not even be made: a file that is gone, a host name that is none."""
    is_unmade = isinstance(error, ValueError) or not isinstance(error, requests.RequestException)
    return is_unmade or any(type(each).__name__ == "LocationParseError" for each in causes(error))


def is_about_tls(error: BaseException) -> bool:
    """Return whether the two could not agree on a certificate or a version, which a person must mend."""
    return isinstance(error, requests.exceptions.SSLError) and not isinstance(root_cause(error), _BROKEN_OFF)


def tokens(url: str) -> Iterator[str]:
    """Yield what may be secret of *url*: all but scheme, host and port, whole and in parts, and as it is sent."""
    parts = urlsplit(url)
    has_more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    yield from (url if has_more else "", parts.path, parts.query, parts.username or "", parts.password or "")
    yield from (unquote(parts.username or ""), unquote(parts.password or ""), unquote(parts.path))
    if "@" in parts.netloc:
        yield from _basic(unquote(parts.username or ""), unquote(parts.password or ""))
    yield from (value for _, value in parse_qsl(parts.query))
    yield from (segment for segment in parts.path.split("/") if len(segment) >= _SHORTEST_TOKEN)


def _basic(user: str, password: str) -> Iterator[str]:
    """Yield what Authorization and Proxy-Authorization make of a user and a password (RFC 7617 section 2)."""
    pair = f"{user}:{password}"
    yield pair
    for charset in ("latin-1", "utf-8"):  # requests writes the former
        yield base64.b64encode(pair.encode(charset, "replace")).decode("ascii")
