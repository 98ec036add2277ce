"""Validates user names, and compares them by NFKC and casefold.

All spellings of a name must identify the same user. Otherwise, one person could count as two approvers, or a disabled
user could sign in with a different spelling.
"""

from __future__ import annotations

import re
import unicodedata

from bridge.text import escaped

MOST_CHARACTERS = 256
#: These variation selectors are invisible.
_VARIANTS = re.compile("[\ufe00-\ufe0f]")


def user_name_in(text: str) -> str | None:
    """Return the normalized name, or None if *text* is not a valid name.

    A name is invalid if it is empty, too long, or has invisible characters.
    """
    if len(text) > MOST_CHARACTERS:
        return None
    name = unicodedata.normalize("NFC", text).strip()
    is_seen = name.isprintable() and escaped(name) == name and _VARIANTS.search(name) is None
    return name if name and is_seen and len(name) <= MOST_CHARACTERS else None


def folded_name(name: str) -> str:
    """Return a text that is equal for all spellings of *name*."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(text.split())
