"""Reads JSON (RFC 8259) that means the same on every Python, or refuses it.

`json.loads` alone takes NaN and infinities, makes one of a number that is too large, keeps the last of two members of
one name, and refuses a long integer on some versions only. A refusal quotes nothing of the text.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

#: What int() itself refuses since 3.10.7.
_MOST_DIGITS = 4_300


class JsonRefused(ValueError):
    """The text is no JSON, or JSON that not every parser reads alike; the message says why."""


def loads(text: str, *, most_digits: int = _MOST_DIGITS, allows_duplicates: bool = False) -> Any:
    """Return what *text* holds; raise ValueError when it is no JSON, and JsonRefused, which is one, on any doubt.

    An integer has at most *most_digits* digits.
    """
    try:
        return _decoder(most_digits, allows_duplicates).decode(text)
    except RecursionError:
        raise JsonRefused("it is nested too deeply") from None


@functools.lru_cache(maxsize=8)  # as many as there are callers; making one takes as long as a small document
def _decoder(most_digits: int, allows_duplicates: bool) -> json.JSONDecoder:  # noqa: FBT001 - a cache has no keywords
    def integer(digits: str) -> int:
        if len(digits) > most_digits:
            raise JsonRefused(f"an integer has more than {most_digits} digits")
        return int(digits)

    return json.JSONDecoder(
        object_pairs_hook=dict if allows_duplicates else _without_duplicates,
        parse_int=integer,
        parse_float=_finite,
        parse_constant=_refuse_constant,
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise JsonRefused("a member occurs twice")
    return members


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonRefused("a number is out of range")
    return number


def _refuse_constant(name: str) -> Any:
    raise JsonRefused(f"{name} is not JSON")
