"""Converts plain TOML values into a frozen struct, leaf by leaf, so that all mistakes of a file are told at once.

``msgspec.convert`` of a whole table stops at its first mistake, and repeats a secret that stands in the wrong place.
So the fields of the struct are walked here and each leaf is converted by itself. The sentences are in ``mistakes``.
"""

from __future__ import annotations

import math
import re
import types as builtin_types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from bridge.config.mistakes import Problem, Problems, join, missing, no_table, unknown, wrong, wrong_type
from bridge.errors import BridgeError

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NONE: Mapping[str, Any] = {}


class Check(msgspec.Struct, frozen=True):
    """Put into ``Annotated``: a rule that a type cannot express.

    *rule* takes the converted value and raises ValueError with what it must be, and any hint as a second argument.
    """

    rule: Callable[[Any], None]


def check_name(value: str) -> None:
    """Raise ValueError unless *value* may be the name of a sink or a rule: it stands in logs, metrics and records."""
    if not _NAME.fullmatch(value):
        raise ValueError("1 to 64 characters of A-Z, a-z, 0-9, dot, underscore and hyphen")


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
        return None, [no_table(path, table)]
    wanted = {field.name: field.type for field in msgspec.structs.fields(struct)} | dict(stricter)
    required = [field.name for field in msgspec.structs.fields(struct) if field.required]
    found = [missing(join(path, name), wanted[name]) for name in required if name not in table]
    values = {}
    has_wrong = bool(found)
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
    found += [unknown(path, key, tuple(wanted), elsewhere) for key in table if key not in wanted]
    return (None if found else made), found


def _made(struct: type[_StructT], values: Mapping[str, Any], path: str) -> tuple[_StructT | None, list[Problem]]:
    try:
        return struct(**values), []
    except (ValueError, TypeError, BridgeError) as exc:
        return None, [Problem(path, f": {str(exc) or type(exc).__name__}")]


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
        return None, [wrong_type(path, value, wanted, _core(wanted))]
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
