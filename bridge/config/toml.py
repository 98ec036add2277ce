"""Converts plain TOML values into a frozen struct, leaf by leaf, so that all mistakes of a file are told at once.

``msgspec.convert`` of a whole table stops at its first mistake, and repeats a secret that stands in the wrong place.
So the fields of the struct are walked here, each leaf is converted by itself, and each mistake becomes one sentence:
the key's path, the value as far as it may be shown, and what to write instead.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import types as builtin_types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect as types

from bridge.config.quoting import MOST_SHOWN, is_secret_name, program_of, quotable
from bridge.errors import BridgeError
from bridge.text import nearest

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NONE: Mapping[str, Any] = {}
_LISTS = (types.VarTupleType, types.ListType, types.SetType, types.FrozenSetType)
_CONTAINERS = (*_LISTS, types.DictType)


class Check(msgspec.Struct, frozen=True):
    """Put into ``Annotated``: a rule that a type cannot express.

    *rule* takes the converted value and raises ValueError with what it must be, and any hint as a second argument.
    """

    rule: Callable[[Any], None]


def check_name(value: str) -> None:
    """Raise ValueError unless *value* may be the name of a sink or a rule: it stands in logs, metrics and records."""
    if not _NAME.fullmatch(value):
        raise ValueError("1 to 64 characters of A-Z, a-z, 0-9, dot, underscore and hyphen")


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


def convert(
    table: object,
    struct: type[_StructT],
    path: str,
    problems: Problems,
    *,
    stricter: Mapping[str, Any] = _NONE,
    elsewhere: Mapping[str, str] = _NONE,
    apart: Collection[str] = (),
) -> _StructT | None:
    """Return *table* as a *struct*; None when it had mistakes, which are then in *problems*.

    A ValueError or TypeError from the struct's ``__post_init__`` is a mistake of the table. *stricter* maps fields to
    types that replace their own. *elsewhere* says of keys that are not this table's where they belong. A mistake in a
    key of *apart* does not keep the ``__post_init__`` from being asked about the others.
    """
    made, found = _convert_table(table, struct, path, stricter=stricter, elsewhere=elsewhere, apart=apart)
    problems.extend(found)
    return made


def _convert_table(
    table: object,
    struct: type[_StructT],
    path: str,
    *,
    stricter: Mapping[str, Any] = _NONE,
    elsewhere: Mapping[str, str] = _NONE,
    apart: Collection[str] = (),
) -> tuple[_StructT | None, list[Problem]]:
    if not isinstance(table, Mapping):
        brackets = "one pair of brackets" if isinstance(table, list) else "a header"
        return None, [wrong(path, table, f"one table. Write it with {brackets}: [{path}]")]
    wanted = {field.name: field.type for field in msgspec.structs.fields(struct)} | dict(stricter)
    required = [field.name for field in msgspec.structs.fields(struct) if field.required]
    missing = [name for name in required if name not in table]
    found = [Problem(join(path, name), f" is missing. It must be {in_words(wanted[name])}.") for name in missing]
    values = {}
    has_wrong = bool(missing)
    for name in wanted:
        if name in table:
            value, mistakes = convert_value(table[name], wanted[name], join(path, name), elsewhere=elsewhere)
            found += mistakes
            if not mistakes:
                values[name] = value
            elif name not in apart or name in required:
                has_wrong = True
    made = None
    if not has_wrong:
        made, mistakes = _made(struct, values, path)
        found += mistakes
    found += [
        Problem(join(path, key), f" is no known key.{_hint(key, tuple(wanted), elsewhere)}")
        for key in table
        if key not in wanted
    ]
    return (None if found else made), found


def _made(struct: type[_StructT], values: Mapping[str, Any], path: str) -> tuple[_StructT | None, list[Problem]]:
    try:
        return struct(**values), []
    except (ValueError, TypeError, BridgeError) as exc:
        return None, [Problem(path, f": {str(exc) or type(exc).__name__}")]


def _hint(key: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Return what to write instead of an unknown key; for a secret, where it may stand."""
    name = key.lower().replace("-", "_")
    outside = [each for each in known if each.endswith(("_file", "_env")) and name in each]
    if outside and is_secret_name(name):
        return f" A secret never stands in this file: write {' or '.join(outside)} instead."
    return (nearest(key, known) + elsewhere.get(key, "")) or f" Known here: {', '.join(known)}."


def convert_value(
    value: object, wanted: Any, path: str, *, elsewhere: Mapping[str, str] = _NONE
) -> tuple[Any, list[Problem]]:
    """Return *value* as the type *wanted*, and what is wrong with it; with a problem the value is None."""
    core = _core(wanted)
    if isinstance(core, type) and issubclass(core, msgspec.Struct):
        return _convert_table(value, core, path, elsewhere=elsewhere)
    inner, arguments = typing.get_origin(core), typing.get_args(core)
    found: list[Problem] = []
    if inner is dict and isinstance(value, Mapping):
        items = {key: convert_value(item, arguments[1], join(path, key)) for key, item in value.items()}
        found = [problem for _, problems in items.values() for problem in problems]
        value = {key: item for key, (item, _) in items.items()}
    elif inner in (tuple, list, frozenset, set) and isinstance(value, list):
        parts = [convert_value(item, arguments[0], f"{path}[{n}]") for n, item in enumerate(value)]
        found = [problem for _, problems in parts for problem in problems]
        value = [item for item, _ in parts]
    return (None, found) if found else _converted(value, wanted, path)


def _core(wanted: Any) -> Any:
    """Return the type inside ``Annotated`` and beside None."""
    if typing.get_origin(wanted) in (typing.Union, builtin_types.UnionType):
        others = [each for each in typing.get_args(wanted) if each is not type(None)]
        return _core(others[0]) if len(others) == 1 else wanted
    return _core(typing.get_args(wanted)[0]) if typing.get_origin(wanted) is typing.Annotated else wanted


def _checks(wanted: Any) -> Iterator[Check]:
    """Yield the checks on *wanted* itself; those on the items of a list belong to the items."""
    if typing.get_origin(wanted) in (typing.Union, builtin_types.UnionType):
        for each in typing.get_args(wanted):
            yield from _checks(each)
    elif typing.get_origin(wanted) is typing.Annotated:
        yield from (each for each in wanted.__metadata__ if isinstance(each, Check))


def _converted(value: object, wanted: Any, path: str) -> tuple[Any, list[Problem]]:
    if not _is_finite(value):
        return None, [wrong(path, value, "a finite number")]
    try:
        made = msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        info = types.type_info(_core(wanted))
        if isinstance(value, str) and isinstance(info, _CONTAINERS):
            return None, [Problem(path, f" is {program_of(path, value)}, but must be {in_words(wanted)}.")]
        return None, [wrong(path, value, in_words(wanted), _value_hint(value, info, path))]
    try:
        for check in _checks(wanted):
            check.rule(made)
    except ValueError as exc:
        return None, [wrong(path, value, *exc.args)]
    return made, []


def _is_finite(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_finite(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def _value_hint(value: object, info: types.Type, path: str) -> str:
    if isinstance(info, types.LiteralType | types.EnumType) and isinstance(value, str) and not is_secret_name(path):
        return nearest(value, [str(each) for each in _choices(info)])
    if isinstance(info, types.StrType) and isinstance(value, dt.date | dt.time | float):
        return "" if is_secret_name(path) else f' Write it in quotes: "{value}".'
    return ""


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
