"""Validates and compares the names of users by Unicode rules (NFKC and casefold), never by SQL.

A person must not count as two approvers, and a disabled user must not log in, with another spelling of the name.
"""

from __future__ import annotations

import re
import unicodedata

from bridge.text import escaped

MOST_CHARACTERS = 256
#: Invisible variation selectors.
_VARIANTS = re.compile("[\ufe00-\ufe0f]")


def user_name_in(text: str) -> str | None:
    """Return the normalized name; None if *text* is empty, too long, or has invisible characters."""
    if len(text) > MOST_CHARACTERS:
        return None
    name = unicodedata.normalize("NFC", text).strip()
    is_seen = name.isprintable() and escaped(name) == name and _VARIANTS.search(name) is None
    return name if name and is_seen and len(name) <= MOST_CHARACTERS else None


def folded_name(name: str) -> str:
    """Return a text that is equal for all spellings of *name*."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(text.split())
