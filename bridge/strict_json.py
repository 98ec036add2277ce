"""Reads JSON (RFC 8259) strictly: text that parsers could read differently is rejected.

`json.loads` accepts NaN and infinite numbers, replaces a number that is too large with infinity, and keeps only the
last of two members with the same name. On some Python versions, it also accepts integers of any length. The error
messages of this module contain no part of the text.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

#: `int()` has the same limit since Python 3.10.7.
_MOST_DIGITS = 4_300


class JsonRefused(ValueError):
    """The text is not JSON, or different parsers could read it differently. The message contains the reason."""


def loads(text: str, *, most_digits: int = _MOST_DIGITS, allows_duplicates: bool = False) -> Any:
    """Return the value of *text*. Raises ValueError if *text* is not JSON, and JsonRefused if it is ambiguous.

    An integer can have at most *most_digits* digits. JsonRefused is a subclass of ValueError.
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
