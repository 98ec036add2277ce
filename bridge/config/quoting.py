"""What a message may show of a value that stands in the wrong place: never a secret.

A configuration error quotes what it found, and is then read in a terminal, a CI log or a ticket. So a value is judged
by the name of its key, by a near miss of such a name (``pasword``), and by its own looks; in doubt it is ``<secret>``.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from difflib import get_close_matches
from urllib.parse import urlsplit

SECRET = "<secret>"  # noqa: S105  # what stands in a secret's place
MOST_SHOWN = 80

_SECRET_NAME = re.compile(r"secret|token|passw|passphrase|pwd|key|auth|signature|cookie|connectionstring|credentials")
#: These count as whole words alone: "path" and "pattern" hold no secret.
_WHOLE_WORDS = frozenset({"bearer", "credential", "jwt", "pass", "pat", "pw", "sas", "sig"})
_SECRET_WORDS = ("secret", "token", "password", "authorization", "connectionstring")
_SECRET_VALUE = re.compile(r"(?i)^whsec_|^eyJ|^(bearer|basic) |(key|secret|token|password|sig|signature)=")
_NEAR_A_SECRET_WORD = 0.75
#: A command line has its secrets among the arguments.
_COMMAND_NAME = re.compile(r"(^|\.)(command|cmd|args?|argv|exec)(\[\d+\])*$")
_HAS_OPTIONS = re.compile(r"\s--?[A-Za-z]")
_WEB_SCHEMES = frozenset({"http", "https", "amqp", "amqps", "sb"})


def shown(path: str, value: object) -> str:
    """Return *value*, found at the key *path*, as a message may show it: no secret, and not too long."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    if sounds_secret(path):
        return SECRET
    if isinstance(value, str):
        is_command = _COMMAND_NAME.search(path.lower()) or _HAS_OPTIONS.search(value)
        return _first_word(value) if is_command else _text(value)
    return _other(value)


def sounds_secret(path: str) -> bool:
    """Return whether any key of the dotted *path* sounds as if its value were a secret."""
    for part in re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path).lower().split("."):
        letters = re.sub(r"[^a-z]", "", part)
        if _SECRET_NAME.search(part) or _SECRET_NAME.search(letters):
            return True
        words = [word for word in re.split(r"[^a-z]+", part) if word]
        if not _WHOLE_WORDS.isdisjoint(words):
            return True
        if any(get_close_matches(word, _SECRET_WORDS, n=1, cutoff=_NEAR_A_SECRET_WORD) for word in words):
            return True
    return False


def _other(value: object) -> str:
    if isinstance(value, dt.date | dt.time):
        return f"the date or time {value}"
    # str() of a whole number with thousands of digits raises since Python 3.11
    if isinstance(value, int) and abs(value) >= 10**MOST_SHOWN:
        return f"a number of more than {MOST_SHOWN} digits"
    return f"{value:.12g}" if isinstance(value, float) else str(value)[:MOST_SHOWN]


def _text(value: str) -> str:
    if "://" in value:
        value = _url(value)
    elif _SECRET_VALUE.search(value):
        return SECRET
    return repr(value if len(value) <= MOST_SHOWN else value[:MOST_SHOWN] + "...")


def _first_word(value: str) -> str:
    first, *others = value.split(maxsplit=1) or [""]
    said = SECRET if _SECRET_VALUE.search(value) else _text(first)
    return f"{said} and more" if others and said != SECRET else said


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
