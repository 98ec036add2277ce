"""What a message may quote of a value that stands at a known key where another must: never a secret.

A configuration error is read in a terminal, a CI log or a ticket. The value of an unknown key is never quoted, since
it may be anything. A known key holds no secret, unless its author gave it the name of one; but a URL may carry one
everywhere but in its host, and some secrets can be told by how they begin.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

SECRET = "<secret>"  # noqa: S105  # what stands in a secret's place
MOST_SHOWN = 80

_SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|pwd|key|auth|bearer|signature|cookie|credential|connection_string|(^|_)sas($|_)"
)
_SECRET_VALUE = re.compile(r"(?i)^whsec_|^eyJ|^(bearer|basic) |(key|secret|token|password|sig|signature)=")
_OPTION = re.compile(r"\s--?[A-Za-z]")
_WEB_SCHEMES = frozenset({"http", "https", "amqp", "amqps", "sb"})


def quotable(path: str, value: object) -> str:
    """Return *value*, found at the known key *path*, as a message may show it: no secret, and not too long."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    if is_secret_name(path):
        return SECRET
    return _text(value) if isinstance(value, str) else _other(value)


def program_of(path: str, command: str) -> str:
    """Return what a message may show of a *command* line: its secrets are among the arguments."""
    first, *others = command.split(maxsplit=1) or [""]
    return f"{quotable(path, first)} and more" if others else quotable(path, first)


def is_secret_name(path: str) -> bool:
    """Return whether any key of the dotted *path* sounds as if its value were a secret."""
    return any(_SECRET_NAME.search(part) for part in path.lower().replace("-", "_").split("."))


def _other(value: object) -> str:
    if isinstance(value, dt.date | dt.time):
        return f"the date or time {value}"
    # str() of a whole number with thousands of digits raises since Python 3.11
    if isinstance(value, int) and abs(value) >= 10**MOST_SHOWN:
        return f"a number of more than {MOST_SHOWN} digits"
    return f"{value:.12g}" if isinstance(value, float) else str(value)[:MOST_SHOWN]


def _text(value: str) -> str:
    if _OPTION.search(value):
        return program_of("", value)
    if "://" in value:
        value = _url(value)
    elif _SECRET_VALUE.search(value):
        return SECRET
    return repr(value if len(value) <= MOST_SHOWN else value[:MOST_SHOWN] + "...")


def _url(value: str) -> str:
    """Return the scheme and host of a URL: its user part, query and path may each be a token."""
    scheme = value.partition("://")[0]
    if scheme.lower() not in _WEB_SCHEMES:
        return f"{scheme}://{SECRET}"
    try:
        parts = urlsplit(value)
    except ValueError:
        return f"{scheme}://{SECRET}"
    host = parts.netloc.rpartition("@")[2]
    return f"{scheme}://{host}" + ("/..." if parts.path.strip("/") else "")
