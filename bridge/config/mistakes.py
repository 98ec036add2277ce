"""The mistakes of a configuration in words: one sentence for a key that is unknown, missing or has a wrong value.

A sentence names the key's path, the value as far as it may be shown, and what to write instead.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import inspect as types

from bridge.config.quoting import MOST_SHOWN, is_secret_name, program_of, quotable
from bridge.text import nearest

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LISTS = (types.VarTupleType, types.ListType, types.SetType, types.FrozenSetType)
_CONTAINERS = (*_LISTS, types.DictType)


class Problem(NamedTuple):
    """One mistake: the path of the key, and what is wrong with it."""

    path: str
    text: str
    """Goes on after the path, and after whose it is: `` is missing.`` or ``: a whole sentence.``"""


def wrong(path: str, value: object, wanted: str, hint: str = "") -> Problem:
    """Return the problem that *value* stands at *path* where *wanted* must."""
    return Problem(path, f" is {quotable(path, value)}, but must be {wanted}.{hint}")


class Problems:
    """The sentences collected so far; *whose* says of whom the next ones are, such as ``sink 'sre-alerts'``."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.whose = ""

    def __len__(self) -> int:
        return len(self.sentences)

    def extend(self, problems: Iterable[Problem]) -> None:
        """Collect *problems*, each with whose it is."""
        about = f" ({self.whose})" if self.whose else ""
        self.sentences += [f"{problem.path}{about}{problem.text}" for problem in problems]

    def add(self, path: str, rest: str) -> None:
        """Collect *path* and *rest* as one sentence."""
        self.extend([Problem(path, f" {rest}")])

    def quote(self, path: str, sentence: str) -> None:
        """Collect a whole *sentence* about *path*."""
        self.extend([Problem(path, f": {sentence}")])

    def wrong(self, path: str, value: object, wanted: str, hint: str = "") -> None:
        """Collect that *value* stands at *path* where *wanted* must."""
        self.extend([wrong(path, value, wanted, hint)])


def join(path: str, key: str) -> str:
    """Return the path of *key* in the table at *path*, quoted where TOML would quote it."""
    quoted = key if _BARE_KEY.fullmatch(key) else repr(key[:MOST_SHOWN])
    return f"{path}.{quoted}" if path else quoted


def missing(path: str, wanted: Any) -> Problem:
    """Return the problem that the key at *path* is missing, whose type is *wanted*."""
    return Problem(path, f" is missing. It must be {in_words(wanted)}.")


def unknown(path: str, key: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> Problem:
    """Return the problem that *key* is none of the *known* keys of the table at *path*, with what to write instead.

    *elsewhere* says of keys that are not this table's where they belong.
    """
    return Problem(join(path, key), f" is no known key.{_instead(key, known, elsewhere)}")


def no_table(path: str, value: object) -> Problem:
    """Return the problem that *value* stands where one table must."""
    brackets = "one pair of brackets" if isinstance(value, list) else "a header"
    return wrong(path, value, f"one table. Write it with {brackets}: [{path}]")


def wrong_type(path: str, value: object, wanted: Any, core: Any) -> Problem:
    """Return the problem that *value* is not of the type *wanted*, which inside ``Annotated`` is *core*."""
    info = types.type_info(core)
    if isinstance(value, str) and isinstance(info, _CONTAINERS):
        return Problem(path, f" is {program_of(path, value)}, but must be {in_words(wanted)}.")
    return wrong(path, value, in_words(wanted), _value_hint(value, info, path))


def in_words(wanted: Any) -> str:
    """Return the type *wanted* in words."""
    infos = types.type_info(wanted)
    members = infos.types if isinstance(infos, types.UnionType) else (infos,)
    return " or ".join(_described(info) for info in members if not isinstance(info, types.NoneType))


def _described(info: types.Type) -> str:
    if isinstance(info, types.FloatType | types.IntType):
        return ("a whole number" if isinstance(info, types.IntType) else "a number") + _bounds(info)
    if isinstance(info, types.StrType):
        pattern = f" that matches {info.pattern}" if info.pattern else ""
        return "text that is not empty" if info.min_length else f"text in quotes{pattern}"
    if isinstance(info, types.LiteralType | types.EnumType):
        return " or ".join(repr(each) for each in _choices(info))
    if isinstance(info, _LISTS):
        return "a list that is not empty" if info.min_length else "a list in square brackets"
    if isinstance(info, types.DictType | types.StructType):
        return "a table"
    return "true or false" if isinstance(info, types.BoolType) else "of another type"


def _choices(info: types.LiteralType | types.EnumType) -> list[Any]:
    return list(info.values) if isinstance(info, types.LiteralType) else [member.value for member in info.cls]


def _bounds(info: types.FloatType | types.IntType) -> str:
    bounds = (("above", info.gt), ("at least", info.ge), ("below", info.lt), ("at most", info.le))
    words = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
    return f" {words}" if words else ""


def _instead(key: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    name = key.lower().replace("-", "_")
    outside = [each for each in known if each.endswith(("_file", "_env")) and name in each]
    if outside and is_secret_name(name):
        return f" A secret never stands in this file: write {' or '.join(outside)} instead."
    return (nearest(key, known) + elsewhere.get(key, "")) or f" Known here: {', '.join(known)}."


def _value_hint(value: object, info: types.Type, path: str) -> str:
    if isinstance(info, types.LiteralType | types.EnumType) and isinstance(value, str) and not is_secret_name(path):
        return nearest(value, [str(each) for each in _choices(info)])
    if isinstance(info, types.StrType) and isinstance(value, dt.date | dt.time | float):
        return "" if is_secret_name(path) else f' Write it in quotes: "{value}".'
    return ""
