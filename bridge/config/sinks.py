"""Reads the ``[[sinks]]`` tables, finds their classes, and validates the settings.

A sink declares its settings as fields and validates settings that depend on each other in ``__post_init__``. This
module validates the settings that all sinks share. A filter that can never match is an error, because the sink would
never send a record.

A sink type is either the name of an entry point in the group ``scheduled_events_bridge.sinks`` or ``module:Class``. The
agent imports only the types that are configured, so the others use no memory, and their SDKs do not have to be
installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import entry_points
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from bridge.config.masking import shown
from bridge.config.mistakes import Problems, join
from bridge.config.settings import SinkSettings
from bridge.config.toml import LONGEST_SECONDS, Check, check_name, convert
from bridge.errors import ConfigurationError
from bridge.events.event import check_spelling
from bridge.events.record import Transition
from bridge.http.lean_requests import import_requests
from bridge.sink import Sink, SinkConfig
from bridge.text import nearest

GROUP = "scheduled_events_bridge.sinks"

#: Types that do not use requests. An agent with no other sink never imports it.
_TYPES_WITHOUT_REQUESTS = frozenset({"command", "eventlog", "file", "otlp", "stdout", "webhook"})

DEFAULT_SINKS: tuple[Mapping[str, Any], ...] = ({"type": "stdout"},)


def _transition(value: str) -> None:
    known = [each.value for each in Transition]
    if value not in known:
        raise ValueError(f"one of {', '.join(known)}", nearest(value, known))


_NotEmpty = Meta(min_length=1)
_RULES: dict[str, Any] = {
    "name": Annotated[str, Check(check_name)],
    "transitions": Annotated[tuple[Annotated[str, Check(_transition)], ...], _NotEmpty] | None,
    "event_types": Annotated[tuple[Annotated[str, Check(check_spelling)], ...], _NotEmpty] | None,
    "event_sources": Annotated[tuple[Annotated[str, Check(check_spelling)], ...], _NotEmpty] | None,
    "timeout_seconds": Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)],
    "max_batch": Annotated[int, Meta(ge=1, le=100_000)],
    "max_age_seconds": Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)] | None,
}


def read_sinks(
    tables: object, mistakes: Problems, *, labels: Mapping[str, str] | None = None
) -> tuple[SinkSettings, ...]:
    """Return the sinks, and add errors to *mistakes*. *labels* is None if they are invalid."""
    if not isinstance(tables, list | tuple):
        mistakes.wrong("sinks", tables, "a list of tables. Write each with two pairs of brackets: [[sinks]]")
        return ()
    found = []
    names: dict[str, str] = {}
    for number, table in enumerate(tables or DEFAULT_SINKS):
        path = f"sinks[{number}]"
        if not isinstance(table, Mapping):
            mistakes.wrong(path, table, "a table. Write it as [[sinks]], followed by its keys")
            continue
        given = table.get("name", table.get("type"))
        if isinstance(given, str) and given:
            mistakes.whose = f"sink {shown('name', given)}"
            first = names.setdefault(given.replace(":", "."), path)
            if first != path:
                mistakes.quote(path, f'{first} has the same name. Give each sink a unique name, with name = "...".')
        sink = _sink(table, path, mistakes)
        if sink is None:
            _suggest_recipe(table, path, mistakes)
        else:
            found.append(sink)
            if labels is not None:
                _check_labels(sink, labels, path, mistakes)
        mistakes.whose = ""
    return tuple(found)


def _suggest_recipe(table: Mapping[str, Any], path: str, mistakes: Problems) -> None:
    """Suggest a recipe if a webhook's format is the name of a service."""
    name = table.get("format")
    if table.get("type") != "webhook" or not isinstance(name, str) or not name.isidentifier():
        return
    if resources.files("bridge.config.recipes").joinpath(f"webhook-{name}.toml").is_file():
        mistakes.quote(
            f"{path}.format", f"`scheduled-events-bridge init --sink webhook:{name}` prints a table for {name}."
        )


def _check_labels(sink: SinkSettings, labels: Mapping[str, str], path: str, mistakes: Problems) -> None:
    try:
        sink.sink_class.check_labels(sink.config, labels)
    except ValueError as error:
        mistakes.quote(path, str(error))


def _sink(table: Mapping[str, Any], path: str, mistakes: Problems) -> SinkSettings | None:
    type_name = table.get("type")
    if not isinstance(type_name, str):
        wanted = f"It must be one of {', '.join(installed())}, or module:Class."
        mistakes.quote(join(path, "type"), f"The type is missing or not text. {wanted}")
        return None
    try:
        cls = sink_class(type_name)
    except ConfigurationError as exc:
        mistakes.quote(join(path, "type"), str(exc))
        return None
    keys = {"name": type_name.replace(":", ".")} | {key: value for key, value in table.items() if key != "type"}
    config = convert(keys, cls.Config, path, mistakes, stricter=base_rules(cls.Config))
    return None if config is None else SinkSettings(type_name=type_name, sink_class=cls, config=config)


def base_rules(config: type[SinkConfig]) -> dict[str, Any]:
    """Return the checks for the shared keys, except for keys whose type *config* redefines."""
    base = {field.name: field.type for field in msgspec.structs.fields(SinkConfig)}
    own = {field.name: field.type for field in msgspec.structs.fields(config)}
    return {name: rule for name, rule in _RULES.items() if own[name] == base[name]}


def installed() -> tuple[str, ...]:
    """Return the sorted names of the installed sink types. No sink is imported."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def sink_class(type_name: str) -> type[Sink]:
    """Return the sink class of *type_name*, which is an installed type or ``module:Class``.

    Raises ConfigurationError if the class does not exist, cannot be imported, or is not a sink.
    """
    module_name, _, class_name = (type_name if ":" in type_name else _target(type_name)).partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise ConfigurationError(
            f"{shown('type', type_name)} is not a sink type. Write the name of an installed type "
            f"({', '.join(installed())}), or 'module:Class', for example 'acme.sinks:PagerSink'."
        )
    module = _module(type_name, module_name)
    if not hasattr(module, class_name):
        hint = nearest(class_name, dir(module))
        raise ConfigurationError(f"Sink type {type_name!r}: {module_name!r} has no class {class_name!r}.{hint}")
    found: object = getattr(module, class_name)
    if not (isinstance(found, type) and issubclass(found, Sink)):
        raise ConfigurationError(
            f"Sink type {type_name!r} is {found!r}, which is not a subclass of bridge.sink.Sink. "
            "Name a class that derives from it."
        )
    config = cast("object", found.Config)
    if not (isinstance(config, type) and issubclass(config, SinkConfig)):
        raise ConfigurationError(
            f"Sink type {type_name!r}: its Config is {config!r}. Make it a frozen subclass of bridge.sink.SinkConfig."
        )
    return found


def _target(type_name: str) -> str:
    for entry in entry_points(group=GROUP, name=type_name):
        return f"{entry.module}:{entry.attr}"
    names = installed()
    listed = ", ".join(names) or "none (install scheduled-events-bridge as a package)"
    raise ConfigurationError(
        f"No sink type is called {shown('type', type_name)}.{nearest(type_name, names)} Known types: {listed}."
    )


def _module(type_name: str, module_name: str) -> object:
    if type_name not in _TYPES_WITHOUT_REQUESTS:
        import_requests()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"Sink type {type_name!r}: the module {exc.name or module_name!r} does not exist. "
            f"Install its package into {sys.prefix}, or add its directory to PYTHONPATH."
        ) from exc
    except Exception as exc:  # a third-party module can raise anything during its import
        raise ConfigurationError(
            f"Sink type {type_name!r} cannot be used: importing {module_name!r} failed with "
            f"{type(exc).__name__}: {exc}. Correct that module, or remove the sink from the configuration."
        ) from exc
