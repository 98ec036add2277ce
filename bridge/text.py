"""Text for people: one line, printable, of a bounded length."""

from __future__ import annotations

_EXCERPT_CHARACTERS = 256


def excerpt(body: bytes) -> str:
    """Return at most 256 characters of *body* on one line, fit for a message."""
    text = body[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", "replace")
    line = "".join(character if character.isprintable() else " " for character in text)
    return line[:_EXCERPT_CHARACTERS]
