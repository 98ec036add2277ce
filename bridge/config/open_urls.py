"""Which URLs carry a secret, as far as a URL can be told by how it looks: those of chats, and those with a token.

Who has such a URL may send there, so it belongs into a file of its own. A plain one must not look so: only hosts that
put the secret into the path, and names of a query that nobody gives to anything else, or whose value is long and mixed.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

#: Their value is a secret whatever it looks like.
_SECRET_NAMES = re.compile(
    r"(?:.*_)?(?:token|secret|sig|signature|passw(?:or)?d|passphrase|pwd|api_?key|access_?key|auth_?key|sas)"
)
#: Their value may be anything, so it must look like a secret.
_UNSURE_NAMES = frozenset({"key", "code", "auth", "authorization", "credential", "hook", "pass"})
_SHORTEST_UNSURE = 16
#: Services that put the secret into the path: the end of the host, and how the path begins.
_SECRET_PATHS = (
    (re.compile(r"hooks\.slack(?:-gov)?\.com"), re.compile(r"/(?:services|workflows|triggers)/.")),
    (re.compile(r"(?:.+\.)?discord(?:app)?\.com"), re.compile(r"/api/(?:v\d+/)?webhooks/[^/]+/.")),
    (re.compile(r".+\.webhook\.office\.com|outlook\.office(?:365)?\.com"), re.compile(r"/webhook(?:b2)?/.")),
    (re.compile(r"hooks\.zapier\.com"), re.compile(r"/hooks/.")),
    (re.compile(r"api\.telegram\.org"), re.compile(r"/bot\d+:.")),
)


def looks_secret(url: str) -> bool:
    """Return whether *url* looks as if whoever knows it may send there."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if any(name.fullmatch(host) and path.match(parts.path) for name, path in _SECRET_PATHS):
        return True
    return any(_is_secret(name.lower().replace("-", "_"), value) for name, value in parse_qsl(parts.query))


def _is_secret(name: str, value: str) -> bool:
    """Return whether the *value* that a query has under *name*, in small letters, is a secret."""
    if _SECRET_NAMES.fullmatch(name):
        return True
    is_mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return name in _UNSURE_NAMES and is_mixed and len(value) >= _SHORTEST_UNSURE
