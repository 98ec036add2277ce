"""What an agent says of itself with each request to the portal: whether a decision would be followed here, and how.

One header, a JSON object in ASCII. It is an offer: nothing depends on it at the agent's end, and a portal that does not
know it passes it over (PROTOCOL.md, section 2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from bridge.config.approval import ApprovalSettings
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import KeyUnusable

#: Servers take 8 KiB of headers; a longer list of names is left out.
_MOST_CHARACTERS = 4_096


def agent_header(settings: ApprovalSettings, keys: Sequence[TrustedKey], *, version: str, is_disabled: bool) -> str:
    """Return the value of the header; *keys* are those of *settings*, whose files are looked at."""
    about: dict[str, object] = {
        "version": version,
        "required_approvals": 1 if settings.remote is None else settings.remote.required_approvals,
        "dry_run": settings.dry_run,
        "disabled": is_disabled,
    }
    whole = _json({**about, "kids": [key.kid for key in keys if _is_usable(key)]})
    return whole if len(whole) <= _MOST_CHARACTERS else _json(about)


def _is_usable(key: TrustedKey) -> bool:
    try:
        key.load()
    except KeyUnusable:
        return False
    return True


def _json(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))
