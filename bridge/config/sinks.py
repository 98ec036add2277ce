"""The ``[[sinks]]`` tables of the file: which class each asks for, and its Config checked.

A sink author declares fields and, where fields depend on one another, a ``__post_init__``; the rules for the keys
that every table has stand here, once. A filter that could never match is refused: it would look like calm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from bridge.config import registry
from bridge.config.quoting import quotable
from bridge.config.settings import LONGEST_SECONDS, SinkSettings
from bridge.config.toml import Check, Problems, check_name, convert, join
from bridge.errors import ConfigurationError
from bridge.events.event import check_event_source, check_event_type
from bridge.events.record import Transition
from bridge.sink import Sink, SinkConfig
from bridge.text import nearest

DEFAULT_SINKS: tuple[Mapping[str, Any], ...] = ({"type": "stdout"},)


def _transition(value: str) -> None:
    known = [each.value for each in Transition]
    if value not in known:
        raise ValueError(f"one of {', '.join(known)}", nearest(value, known))


_NotEmpty = Meta(min_length=1)
_RULES: dict[str, Any] = {
    "name": Annotated[str, Check(check_name)],
    "transitions": Annotated[tuple[Annotated[str, Check(_transition)], ...], _NotEmpty] | None,
    "event_types": Annotated[tuple[Annotated[str, Check(check_event_type)], ...], _NotEmpty] | None,
    "event_sources": Annotated[tuple[Annotated[str, Check(check_event_source)], ...], _NotEmpty] | None,
    "timeout_seconds": Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)],
    "max_batch": Annotated[int, Meta(ge=1, le=100_000)],
    "max_age_seconds": Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)] | None,
}

#: A mistake in one of these hides none of the sink's own: no other key depends on it.
_APART = frozenset(_RULES) - {"name"}


def read_sinks(tables: object, mistakes: Problems, elsewhere: Mapping[str, str]) -> tuple[SinkSettings, ...]:
    """Return the sinks of *tables*; what is wrong with them is then in *mistakes*."""
    if not isinstance(tables, list | tuple):
        mistakes.wrong("sinks", tables, "a list of tables. Write each with two pairs of brackets: [[sinks]]")
        return ()
    found = []
    names: dict[str, str] = {}
    for number, table in enumerate(tables or DEFAULT_SINKS):
        path = f"sinks[{number}]"
        if not isinstance(table, Mapping):
            mistakes.wrong(path, table, "a table. Write it as [[sinks]] and its keys below")
            continue
        name = _called(table)
        mistakes.whose = f"sink {_label(table, name)}" if name else ""
        if name and names.setdefault(name, path) != path:
            mistakes.quote(path, f'{names[name]} has the same name. Give one of them another, with name = "...".')
        sink = _sink(table, name, path, mistakes, elsewhere)
        mistakes.whose = ""
        found += [sink] if sink else []
    return tuple(found)


def _called(table: Mapping[str, Any]) -> str:
    """Return the sink's name; for one without, its type with the colon of ``module:Class`` made a dot."""
    name = table.get("name", table.get("type"))
    return name if "name" in table and isinstance(name, str) else _plain(name)


def _label(table: Mapping[str, Any], name: str) -> str:
    """Return *name* as a message may show it; a URL that stands for the type is no URL any more in its name."""
    given = str(table.get("name", table.get("type")))
    return quotable("name", given if "://" in given else name)


def _plain(type_name: object) -> str:
    return type_name.replace(":", ".") if isinstance(type_name, str) else ""


def _sink(
    table: Mapping[str, Any], name: str, path: str, mistakes: Problems, elsewhere: Mapping[str, str]
) -> SinkSettings | None:
    cls = _class(table.get("type"), path, mistakes)
    if cls is None:
        return None
    keys = {key: value for key, value in table.items() if key != "type"}
    keys.setdefault("name", name)
    config = convert(keys, cls.Config, path, mistakes, stricter=_rules(cls.Config), elsewhere=elsewhere, apart=_APART)
    return SinkSettings(type_name=table["type"], sink_class=cls, config=config) if config is not None else None


def _class(type_name: object, path: str, mistakes: Problems) -> type[Sink] | None:
    where = join(path, "type")
    if not isinstance(type_name, str):
        installed = ", ".join(registry.installed())
        if type_name is None:
            mistakes.add(where, f"is missing. Installed: {installed}.")
        else:
            mistakes.wrong(where, type_name, f"text, one of {installed}")
        return None
    try:
        return registry.sink_class(type_name)
    except ConfigurationError as exc:
        mistakes.quote(where, str(exc))
        return None


def _rules(config: type[SinkConfig]) -> dict[str, Any]:
    """Return the rules for the base keys, but for those whose type the sink has narrowed itself."""
    base = {field.name: field.type for field in msgspec.structs.fields(SinkConfig)}
    own = {field.name: field.type for field in msgspec.structs.fields(config)}
    return {name: rule for name, rule in _RULES.items() if own[name] == base[name]}
