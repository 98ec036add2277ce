"""Values that a configuration may have and hardly means: variables that nobody fills in, events that Azure never sent.

They are allowed, because a `$` may be meant and Azure may add types; so `check-config` warns of them. Where a file is
refused for another reason, a variable is said there too: it is often why. No value is shown but the name of an event
type or source: a text with a variable may hold a secret beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from bridge.events.event import EVENT_SOURCES, EVENT_TYPES
from bridge.text import nearest

_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*[^}]*\}|(?:^|[/:=@,; ])\$[A-Za-z_]\w*|(?:^|[\\\\/=;])%[A-Za-z_]\w{2,}%")
#: In double quotes C:\temp is C:, a tab and emp.
_CUT_PATH = re.compile(r"[A-Za-z]:[^\x00-\x1f]*[\x00-\x1f]")
#: A shell or a template may read what stands there.
_OTHERS_SYNTAX = frozenset({"command", "template", "method", "body"})


def odd_texts(table: object) -> Iterator[str]:
    """Yield a sentence for each text of *table*, a mapping or a struct, that holds a variable or a broken path."""
    for path, key, text, keys in _texts(table, "", "", frozenset()):
        if key.endswith("_env") and text.startswith("$"):
            yield f"{path} begins with $, which is no part of a variable's name. Write the name alone."
        elif key not in _OTHERS_SYNTAX and _VARIABLE.search(text):
            other = f"{key}_env" if f"{key}_env" in keys else None
            instead = (
                f", or name the variable with {other}" if other else "; only keys that end in _env name a variable"
            )
            yield (
                f"{path} holds what reads like a variable, and none is filled in here: the text counts as it stands. "
                f"Write the value{instead}."
            )
        elif _CUT_PATH.match(text):
            yield (
                f"{path} holds a tab or another control character: in double quotes a backslash begins an escape. "
                "Write a path of Windows in single quotes, or with /."
            )


def _texts(value: Any, path: str, key: str, keys: frozenset[str]) -> Iterator[tuple[str, str, str, frozenset[str]]]:
    """Yield the path of each text in *value*, the key it stands under, the text, and which keys its table knows."""
    if isinstance(value, str):
        yield path, key, value, keys
    elif isinstance(value, msgspec.Struct):
        names = frozenset(value.__struct_fields__)
        for name in value.__struct_fields__:
            yield from _texts(getattr(value, name), f"{path}.{name}" if path else name, name, names)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{path}.{name}" if path else str(name), str(name), frozenset(map(str, value)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{number}]", key, keys)


def unknown_events(event_types: Iterable[str] | None, event_sources: Iterable[str] | None) -> Iterator[str]:
    """Yield a sentence for each type and source that Azure has never sent."""
    for key, chosen, known in (
        ("event_types", event_types, EVENT_TYPES),
        ("event_sources", event_sources, EVENT_SOURCES),
    ):
        for each in chosen or ():
            if each not in known:
                word = "type" if key == "event_types" else "source"
                yield (
                    f"{key} names {each[:64]!r}, an event {word} that Azure has never sent.{nearest(each, known)} "
                    f"Known are {', '.join(known)}; it counts as it is written, in case Azure adds it."
                )
