"""Formats text for messages, such as printable lines, durations, and spelling suggestions.

Before you display text from a peer, a file, or a program, pass it to `one_line` or `escaped`. Otherwise, a line break
could forge a log line, an escape sequence could control the terminal, and a character that changes the writing
direction could disguise a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EXCERPT_CHARACTERS = 256
_NEAR = 0.7
_UNITS = (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1))


#: Control characters, line separators, lone surrogates, and invisible characters: directions (UAX 9), joiners, tags.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)


def one_line(text: str, limit: int | None = None) -> str:
    """Return at most *limit* characters of *text*. Spaces replace unprintable characters."""
    return "".join(character if character.isprintable() else " " for character in text[:limit])


def without_nul(text: str) -> str:
    """Return *text* with U+FFFD in place of NUL, which PostgreSQL cannot store."""
    return text.replace("\0", "\ufffd")


def escaped(text: str) -> str:
    """Return *text* on one line, with invisible characters as Python escape sequences."""
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def excerpt(body: bytes) -> str:
    """Return at most 256 characters of *body* on one line, for use in a message."""
    return one_line(body[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace"), EXCERPT_CHARACTERS)


def duration(seconds: float) -> str:
    """Return *seconds* with at most two units, such as "45 s" or "12 min 30 s"."""
    whole = max(int(seconds), 0)
    for unit, size, next_unit, next_size in _UNITS:
        if whole >= size:
            rest = whole % size // next_size
            return f"{whole // size} {unit} {rest} {next_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the most similar known word, or "" if none is."""
    from difflib import get_close_matches  # noqa: PLC0415  # needed only for a mistake

    spelled = {_folded(each): each for each in known}
    found = get_close_matches(_folded(word), sorted(spelled), n=1, cutoff=_NEAR)
    return f" Did you mean {spelled[found[0]]!r}?" if found else ""


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")
