"""Converts TOML tables to frozen structs, and collects the errors of all keys.

Each key is converted separately, because `msgspec.convert` stops at the first error and can quote a secret in its
message. `bridge.config.mistakes` creates the error messages instead.
"""

from __future__ import annotations

import math
import re
import types as builtin_types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from bridge.config.mistakes import Problem, Problems, join, missing, unknown, wrong, wrong_type
from bridge.errors import BridgeError

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NONE: Mapping[str, Any] = {}


class Check(msgspec.Struct, frozen=True):
    """A check in ``Annotated`` for conditions that a type cannot express.

    The agent calls *rule* with the converted value. If the value is invalid, *rule* raises ValueError with a
    description of the valid values, and optionally a hint.
    """

    rule: Callable[[Any], None]


def check_name(value: str) -> None:
    """Raise ValueError unless *value* is a valid name for a sink or a rule."""
    if not _NAME.fullmatch(value):
        raise ValueError("1 to 64 characters of A-Z, a-z, 0-9, dot, underscore and hyphen")


def check_url(value: str, wanted: str) -> SplitResult:
    """Return the parts of an HTTP URL without user, query, or fragment, or raise ValueError."""
    try:
        parts = urlsplit(value)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(wanted) from None
    if not is_usable or "@" in parts.netloc or set("?# ") & set(value) or not value.isprintable():
        raise ValueError(wanted)
    return parts


def convert(
    table: object, struct: type[_StructT], path: str, problems: Problems, *, stricter: Mapping[str, Any] = _NONE
) -> _StructT | None:
    """Return *table* as a *struct*.

    If the table has mistakes, add them to *problems* and return None.

    A ValueError or TypeError from ``__post_init__`` is reported as an error in the table. *stricter* overrides the
    declared types of fields. ``__post_init__`` runs even if these fields are invalid, so it must not depend on them.
    """
    made, found = _convert_table(table, struct, path, stricter)
    problems.extend(found)
    return made


def _convert_table(
    table: object, struct: type[_StructT], path: str, stricter: Mapping[str, Any] = _NONE
) -> tuple[_StructT | None, list[Problem]]:
    if not isinstance(table, Mapping):
        brackets = "one pair of brackets" if isinstance(table, list) else "a header"
        return None, [wrong(path, table, f"one table. Write it with {brackets}: [{path}]")]
    wanted = {field.name: field.type for field in msgspec.structs.fields(struct)} | dict(stricter)
    required = [field.name for field in msgspec.structs.fields(struct) if field.required]
    found = [missing(join(path, name), wanted[name]) for name in required if name not in table]
    is_complete = not found
    values = {}
    for name in [each for each in wanted if each in table]:
        value, mistakes = convert_value(table[name], wanted[name], join(path, name))
        found += mistakes
        if not mistakes:
            values[name] = value
        elif name not in stricter or name in required:
            is_complete = False
    made = None
    if is_complete:
        try:
            made = struct(**values)
        except (ValueError, TypeError, BridgeError) as exc:
            found.append(Problem(path, f": {str(exc) or type(exc).__name__}"))
    found += [unknown(path, key, tuple(wanted)) for key in table if key not in wanted]
    return (None if found else made), found


def convert_value(value: object, wanted: Any, path: str) -> tuple[Any, list[Problem]]:
    """Return *value* converted to *wanted*, and its problems. With problems, return None."""
    core = _core(wanted)
    if isinstance(core, type) and issubclass(core, msgspec.Struct):
        return _convert_table(value, core, path)
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
    if typing.get_origin(wanted) in (typing.Union, builtin_types.UnionType):
        others = [each for each in typing.get_args(wanted) if each is not type(None)]
        return _core(others[0]) if len(others) == 1 else wanted
    return _core(typing.get_args(wanted)[0]) if typing.get_origin(wanted) is typing.Annotated else wanted


def _checks(wanted: Any) -> Iterator[Check]:
    if typing.get_origin(wanted) in (typing.Union, builtin_types.UnionType):
        for each in typing.get_args(wanted):
            yield from _checks(each)
    elif typing.get_origin(wanted) is typing.Annotated:
        yield from (each for each in wanted.__metadata__ if isinstance(each, Check))


def _converted(value: object, wanted: Any, path: str) -> tuple[Any, list[Problem]]:
    if isinstance(value, float) and not math.isfinite(value):
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
