"""Masks secrets in error messages, and detects URLs that contain a secret.

Messages about the configuration can appear in terminals, CI logs, and tickets. The value of an unknown key can be a
secret, so no message quotes such a value. If the value of a known key can contain a secret, the message quotes only the
start of the value. It quotes a URL up to its host, and any other text up to the first space or equals sign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from bridge.system.secrets import MASK

MAX_SHOWN = 80

_SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|pwd|key|auth|bearer|signature|cookie|credential|connection_string|(^|_)(sas|sig)($|_)"
)
_SECRET_VALUE = re.compile(r"whsec_|eyJ")
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?:[^/?#\\]*@)?(?P<host>[^/?#\\]*)(?P<rest>.*)", re.DOTALL)
_WEB_SCHEMES = frozenset({"http", "https", "amqp", "amqps", "sb"})

#: Azure Functions puts the secret of a URL in `code`.
_SECRET_QUERY_NAMES = frozenset({"code"})
_MIN_SECRET_CHARACTERS = 8
#: The path of a webhook URL of these services is the secret.
_SECRET_PATH_HOSTS = (
    "hooks.slack.com", "hooks.slack-gov.com", "discord.com", "discordapp.com", "webhook.office.com",
    "hooks.zapier.com", "api.telegram.org",
)  # fmt: skip


def shown(path: str, value: object) -> str:
    """Return the *value* of the known key *path* for a message, with masked secrets."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    if is_secret_name(path):
        return MASK
    if isinstance(value, str):
        return _text(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)[:MAX_SHOWN]


def is_secret_name(path: str) -> bool:
    """Return whether any part of the dotted *path* suggests a secret."""
    return any(_SECRET_NAME.search(part) for part in path.lower().replace("-", "_").split("."))


def has_secret(url: str) -> bool:
    """Return whether *url* contains a password, a token in its query, or a secret path."""
    try:
        parts = urlsplit(url)
        host = f".{parts.hostname or ''}"
        is_secret_path = parts.path.strip("/") and any(host.endswith(f".{each}") for each in _SECRET_PATH_HOSTS)
        return bool(parts.password or is_secret_path) or any(
            len(value) >= _MIN_SECRET_CHARACTERS and (is_secret_name(name) or name.lower() in _SECRET_QUERY_NAMES)
            for name, value in parse_qsl(parts.query)
        )
    except ValueError:
        return False


def _text(value: str) -> str:
    if _SECRET_VALUE.match(value):
        return MASK
    url = _URL.fullmatch(value)
    if url is not None:
        # The host of a URL with an unknown scheme can also be a secret.
        is_web = url["scheme"].lower() in _WEB_SCHEMES and "@" not in url["rest"]
        return repr(f"{url['scheme']}://{url['host'] if is_web else ''}" + ("/..." if url["rest"].strip("/") else ""))
    part = re.split(r"[\s=]", value, maxsplit=1)[0][:MAX_SHOWN]
    return repr(value if part == value else f"{part}...")
