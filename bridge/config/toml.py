"""Converts TOML tables to frozen structs, and collects the errors of all keys.

Each key is converted separately, because `msgspec.convert` stops at the first error and can quote a secret in its
message. `bridge.config.mistakes` creates the error messages instead.
"""

from __future__ import annotations

import math
import re
import types as builtin_types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from bridge.config.mistakes import Problems, in_words, join
from bridge.errors import BridgeError

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NONE: Mapping[str, Any] = {}

#: Ten years, because `threading` cannot wait much longer.
LONGEST_SECONDS = 315_360_000


class Check(msgspec.Struct, frozen=True):
    """A check in ``Annotated`` for conditions that a type cannot express.

    *rule* receives the converted value. If the value is invalid, *rule* raises ValueError with a description of the
    valid values and, optionally, a hint.
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

    If the table is invalid, add the errors to *problems* and return None.

    The constructor of *struct* checks combinations of keys. If it raises ValueError, the function reports the message
    as a problem of the table. The constructor also receives invalid values, which are not converted. If it then raises
    TypeError or AttributeError, the function ignores this error. *stricter* maps fields to types that are stricter than
    the declared ones.
    """
    before = len(problems)
    if not isinstance(table, Mapping):
        brackets = "one pair of brackets" if isinstance(table, list) else "a header"
        problems.wrong(path, table, f"one table. Write it with {brackets}: [{path}]")
        return None
    fields = msgspec.structs.fields(struct)
    wanted = {field.name: field.type for field in fields} | dict(stricter)
    required = [field.name for field in fields if field.required]
    for name in required:
        if name not in table:
            problems.add(join(path, name), f" is missing. It must be {in_words(wanted[name])}.")
    values = {}
    for name in [each for each in wanted if each in table]:
        known = len(problems)
        value = _convert_value(table[name], wanted[name], join(path, name), problems)
        values[name] = value if len(problems) == known else table[name]
    made, is_valid = None, len(problems) == before
    if values.keys() >= set(required):
        try:
            made = struct(**values)
        except (ValueError, TypeError, AttributeError, BridgeError) as exc:
            if is_valid or isinstance(exc, ValueError | BridgeError):
                problems.quote(path, str(exc) or type(exc).__name__)
    for key in table:
        if key not in wanted:
            problems.unknown(path, key, tuple(wanted))
    return made if len(problems) == before else None


def _convert_value(value: object, wanted: Any, path: str, problems: Problems) -> Any:
    """Return *value* converted to *wanted*. If it has problems, add them and return None."""
    core, checks = _core_and_checks(wanted)
    if isinstance(core, type) and issubclass(core, msgspec.Struct):
        return convert(value, core, path, problems)
    before = len(problems)
    outer, arguments = typing.get_origin(core), typing.get_args(core)
    if outer is dict and isinstance(value, Mapping):
        value = {key: _convert_value(item, arguments[1], join(path, key), problems) for key, item in value.items()}
    elif outer in (tuple, list, frozenset, set) and isinstance(value, list):
        value = [_convert_value(item, arguments[0], f"{path}[{n}]", problems) for n, item in enumerate(value)]
    if len(problems) > before:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        problems.wrong(path, value, "a finite number")
        return None
    try:
        made = msgspec.convert(value, wanted)
        for check in checks:
            check.rule(made)
    except msgspec.ValidationError:
        problems.wrong_type(path, value, wanted, core)
    except ValueError as exc:
        problems.wrong(path, value, *exc.args)
    else:
        return made
    return None


def _core_and_checks(wanted: Any) -> tuple[Any, list[Check]]:
    """Return the type inside ``Annotated`` and ``| None``, and its checks."""
    outer = typing.get_origin(wanted)
    inner = [each for each in typing.get_args(wanted) if each is not type(None)]
    if outer is typing.Annotated:
        return _core_and_checks(inner[0])[0], [each for each in wanted.__metadata__ if isinstance(each, Check)]
    if outer in (typing.Union, builtin_types.UnionType) and len(inner) == 1:
        return _core_and_checks(inner[0])
    return wanted, []
