"""Creates messages for unknown keys, missing keys, and wrong values.

Each message contains the path of the key, its value with secrets masked, and the expected value. If a key is unknown,
the message suggests the most similar valid key. The agent reports all errors at once and exits with code 78.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec import inspect as types

from bridge.config.masking import MAX_SHOWN, is_secret_name, shown
from bridge.text import nearest

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LISTS = (types.VarTupleType, types.ListType, types.SetType, types.FrozenSetType)


class Problems:
    """Collects error messages about the table *whose*, such as ``sink 'sre-alerts'``."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.whose = ""

    def __len__(self) -> int:
        return len(self.sentences)

    def add(self, path: str, text: str, *, before: str = "") -> None:
        """Add a message about the key at *path*. *before* precedes the path, and *text* follows."""
        about = f" ({self.whose})" if self.whose else ""
        self.sentences.append(f"{before}{path}{about}{text}")

    def quote(self, path: str, sentence: str) -> None:
        """Add a problem with the complete sentence *sentence* about *path*."""
        self.add(path, f": {sentence}")

    def wrong(self, path: str, value: object, wanted: str, hint: str = "") -> None:
        """Report that the key at *path* has *value* instead of *wanted*."""
        self.add(path, f" is {shown(path, value)}, but must be {wanted}.{hint}")

    def wrong_type(self, path: str, value: object, wanted: Any, core: Any) -> None:
        """Report a *value* of the wrong type. *core* is *wanted* without ``Annotated`` and None."""
        choices = _choices(types.type_info(core)) if not is_secret_name(path) else []
        self.wrong(path, value, in_words(wanted), nearest(value, choices) if isinstance(value, str) else "")

    def unknown(self, path: str, key: str, known: Sequence[str]) -> None:
        """Report an unknown *key* in *path*. *known* lists the valid keys."""
        name = key.lower().replace("-", "_")
        outside = [each for each in known if each.endswith(("_file", "_env")) and name in each]
        if outside and is_secret_name(name):
            hint = f" Did you mean {' or '.join(outside)}? The configuration must not contain the secret itself."
        else:
            hint = nearest(key, known) or f" Valid keys: {', '.join(known)}."
        self.add(f"`{join(path, key)}`", f".{hint}", before="Unknown key ")


def join(path: str, key: str) -> str:
    """Return the path of *key* in the table *path*, with quotes where TOML requires quotes."""
    quoted = key if _BARE_KEY.fullmatch(key) else repr(key[:MAX_SHOWN])
    return f"{path}.{quoted}" if path else quoted


def in_words(wanted: Any) -> str:
    """Return a description of the type *wanted*, such as "a whole number at least 1"."""
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
        return " or ".join(map(repr, _choices(info)))
    if isinstance(info, _LISTS):
        return "a list that is not empty" if info.min_length else "a list in square brackets"
    if isinstance(info, types.DictType | types.StructType):
        return "a table"
    return "true or false" if isinstance(info, types.BoolType) else "of another type"


def _choices(info: types.Type) -> list[Any]:
    if isinstance(info, types.LiteralType):
        return list(info.values)
    return [member.value for member in info.cls] if isinstance(info, types.EnumType) else []


def _bounds(info: types.FloatType | types.IntType) -> str:
    bounds = (("above", info.gt), ("at least", info.ge), ("below", info.lt), ("at most", info.le))
    words = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
    return f" {words}" if words else ""
