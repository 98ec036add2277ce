"""Parses JSON (RFC 8259), and rejects text that parsers could interpret differently.

Unlike `json.loads`, this module rejects NaN, infinity, numbers that overflow, very long integers, and duplicate names
in an object. Error messages never quote the JSON text.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

#: The limit of `int()` in Python 3.10.7 and later.
_MOST_DIGITS = 4_300


class JsonRefused(ValueError):
    """The JSON text is ambiguous or exceeds a limit. The message contains the reason."""


def loads(text: str, *, most_digits: int = _MOST_DIGITS, allows_duplicates: bool = False) -> Any:
    """Return the value of the JSON *text*. An integer can have at most *most_digits* digits.

    Raises ValueError if *text* is not JSON, and the subclass JsonRefused if *text* is ambiguous or exceeds a limit.
    """
    try:
        return _decoder(most_digits, allows_duplicates).decode(text)
    except RecursionError:
        raise JsonRefused("it is nested too deeply") from None


@functools.lru_cache(maxsize=8)  # creating a decoder takes as long as decoding a small document
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
