"""Names of people: what may be one, and which two are the same person's.

A name comes from a form, a command or a proxy, each with its own spelling: another case, an accent of its own, or
two spaces. Whoever is asked for two people must not be shown one twice, and who is let in no more must not come back in
capitals. So names are compared as Unicode compares what looks alike (NFKC and casefold), and never as SQL does.
"""

from __future__ import annotations

import re
import unicodedata

from bridge.text import escaped

MOST_CHARACTERS = 256
#: Signs that change how another is drawn, and are not seen themselves.
_VARIANTS = re.compile("[\ufe00-\ufe0f]")


def user_name_in(text: str) -> str | None:
    """Return the name that *text* is, in one form; None for what is empty, too long, or not seen as it is."""
    if len(text) > MOST_CHARACTERS:
        return None
    name = unicodedata.normalize("NFC", text).strip()
    is_seen = name.isprintable() and escaped(name) == name and _VARIANTS.search(name) is None
    return name if name and is_seen and len(name) <= MOST_CHARACTERS else None


def folded_name(name: str) -> str:
    """Return what is the same for all spellings of *name*."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(text.split())
