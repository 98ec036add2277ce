"""Validates user names, compares them, and builds the keys that identify people.

Names are compared after NFKC normalization and case folding, so all spellings of a name identify the same user.
Otherwise, one person could count as two approvers, or a disabled user could sign in with a different spelling.

A person who signs in with OpenID Connect is identified by issuer and subject. The portal never compares the names that
a provider reports, because a provider can later give the same name to someone else.
"""

from __future__ import annotations

import re
import unicodedata

from bridge.text import escaped

MOST_CHARACTERS = 256
#: The issuer of local users and of users whom a proxy authenticates. An OpenID Connect issuer is a URL.
LOCAL = "local"
#: These variation selectors are invisible.
_VARIANTS = re.compile("[\ufe00-\ufe0f]")


def user_name_in(text: str) -> str | None:
    """Return the normalized name, or None if *text* is not a valid name.

    A name is invalid if it is empty, too long, or contains invisible characters.
    """
    if len(text) > MOST_CHARACTERS:
        return None
    name = unicodedata.normalize("NFC", text).strip()
    is_seen = name.isprintable() and escaped(name) == name and _VARIANTS.search(name) is None
    return name if name and is_seen and len(name) <= MOST_CHARACTERS else None


def folded_name(name: str) -> str:
    """Return the same string for all spellings of *name*."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(text.split())


def person_key(issuer: str, subject: str) -> str:
    """Return the key of a person. *issuer* must not contain a space."""
    return f"{issuer} {subject}"


def local_key(name: str) -> str:
    """Return the key of the local user *name* in any spelling."""
    return person_key(LOCAL, folded_name(name))


def issuer_of(key: str) -> str:
    """Return the issuer of the person with *key*."""
    return key.partition(" ")[0]
