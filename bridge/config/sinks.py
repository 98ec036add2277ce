"""The ``[[sinks]]`` tables of the file: which class each asks for, and its Config checked.

A sink author declares fields and, where fields depend on one another, a ``__post_init__``; the rules for the keys
that every table has stand here, once. A filter that could never match is refused: the sink would stay silent.

The project's own sinks and anybody else's come by the same road, an entry point of the group
``scheduled_events_bridge.sinks``; ``module:Class`` does without packaging. Listing what is installed imports nothing,
and only the type that was asked for is imported: a sink that is not configured costs no memory, and its missing SDK
harms nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from bridge.config.mistakes import Problems, join
from bridge.config.quoting import quotable
from bridge.config.settings import LONGEST_SECONDS, SinkSettings
from bridge.config.toml import Check, check_name, convert
from bridge.errors import ConfigurationError, UnknownSinkType
from bridge.events.event import check_event_source, check_event_type
from bridge.events.record import Transition
from bridge.sink import Sink, SinkConfig, how_to_install
from bridge.text import nearest

GROUP = "scheduled_events_bridge.sinks"

#: Packages that an extra of this distribution brings, so that a missing one is named with its cure.
EXTRAS = {"apprise": "apprise", "jinja2": "template", "aiohttp": "websocket"}

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


def read_sinks(
    tables: object, mistakes: Problems, elsewhere: Mapping[str, str], *, labels: Mapping[str, str] | None = None
) -> tuple[SinkSettings, ...]:
    """Return the sinks of *tables*; what is wrong with them is then in *mistakes*.

    *labels* are what every record gets, None while that is unknown.
    """
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
        if sink is not None and labels is not None:
            _check_labels(sink, labels, path, mistakes)
        mistakes.whose = ""
        found += [sink] if sink else []
    return tuple(found)


def _check_labels(sink: SinkSettings, labels: Mapping[str, str], path: str, mistakes: Problems) -> None:
    try:
        sink.sink_class.check_labels(sink.config, labels)
    except ValueError as error:
        mistakes.quote(path, str(error))


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
    config = convert(
        keys, cls.Config, path, mistakes, stricter=base_rules(cls.Config), elsewhere=elsewhere, apart=_APART
    )
    return SinkSettings(type_name=table["type"], sink_class=cls, config=config) if config is not None else None


def _class(type_name: object, path: str, mistakes: Problems) -> type[Sink] | None:
    where = join(path, "type")
    if not isinstance(type_name, str):
        known = ", ".join(installed())
        if type_name is None:
            mistakes.add(where, f"is missing. Installed: {known}.")
        else:
            mistakes.wrong(where, type_name, f"text, one of {known}")
        return None
    try:
        return sink_class(type_name)
    except ConfigurationError as exc:
        mistakes.quote(where, str(exc))
        return None


def base_rules(config: type[SinkConfig]) -> dict[str, Any]:
    """Return the rules for the base keys, but for those whose type the sink has narrowed itself."""
    base = {field.name: field.type for field in msgspec.structs.fields(SinkConfig)}
    own = {field.name: field.type for field in msgspec.structs.fields(config)}
    return {name: rule for name, rule in _RULES.items() if own[name] == base[name]}


def installed() -> tuple[str, ...]:
    """Return the names of the installed sink types, sorted, without importing any of them."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def sink_class(type_name: str) -> type[Sink]:
    """Return the class behind *type_name*, an installed type or ``module:Class``.

    Raises UnknownSinkType when there is no such type, module or class, and ConfigurationError when there is, but it
    cannot be imported or is no sink.
    """
    target = type_name if ":" in type_name else _target(type_name)
    return _checked(type_name, _attribute(type_name, target))


def _target(type_name: str) -> str:
    """Return the ``module:Class`` that the entry point called *type_name* stands for."""
    entries = {_without_extras(entry): entry for entry in entry_points(group=GROUP) if entry.name == type_name}
    if not entries:
        raise UnknownSinkType(_unknown(type_name))
    if len(entries) > 1:
        raise ConfigurationError(
            f"More than one installed package provides the sink type {type_name!r}: {', '.join(sorted(entries))}. "
            "Write the one you mean in place of the name, or uninstall the other."
        )
    return next(iter(entries))


def _without_extras(entry: EntryPoint) -> str:
    return f"{entry.module}:{entry.attr}"


def _unknown(type_name: str) -> str:
    names = installed()
    listed = ", ".join(names) or "none (is scheduled-events-bridge installed, or only copied?)"
    hint = _recipe_hint(type_name) or nearest(type_name, names)
    return f"No sink type is called {quotable('type', type_name)}.{hint} Installed: {listed}."


def _recipe_hint(name: str) -> str:
    """Return which type serves the destination *name*, such as slack, when there is a recipe for it."""
    from importlib import resources  # noqa: PLC0415  # only a file that is wrong pays for it

    for file in resources.files("bridge.config.recipes").iterdir():
        type_name, _, destination = file.name.removesuffix(".toml").partition("-")
        if destination == name.lower():
            return f' For it take type = "{type_name}"; `init --sink {type_name}:{destination}` writes such a table.'
    return ""


def _attribute(type_name: str, target: str) -> object:
    module_name, _, path = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise UnknownSinkType(
            f"{quotable('type', type_name)} is no sink type. Write the name of an installed one "
            f"({', '.join(installed())}), or 'module:Class', for example 'acme.sinks:PagerSink'."
        )
    found: object = _module(type_name, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            hint = nearest(part, dir(found))
            raise UnknownSinkType(f"Sink type {type_name!r}: {module_name!r} has no class {path!r}.{hint}")
        found = getattr(found, part)
    return found


def _module(type_name: str, module_name: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        raise _missing(type_name, module_name, exc.name or module_name) from exc
    except Exception as exc:  # a stranger's module may raise anything while it is imported
        raise ConfigurationError(
            f"Sink type {type_name!r} cannot be used: importing {module_name!r} failed with "
            f"{type(exc).__name__}: {exc}. Mend that module, or take the sink out of the configuration."
        ) from exc


def _missing(type_name: str, module_name: str, missing: str) -> ConfigurationError:
    """Return the sentence for a module that is not there: the sink's own, or one that it needs."""
    if module_name == missing or module_name.startswith(f"{missing}."):
        return UnknownSinkType(
            f"Sink type {type_name!r}: there is no module {missing!r}. "
            f"Install the package that brings it into {sys.prefix}, or put its folder on PYTHONPATH."
        )
    package = missing.partition(".")[0]
    extra = EXTRAS.get(package)
    how = how_to_install(extra) if extra else f"Install the package that brings {package!r} into {sys.prefix}"
    return ConfigurationError(
        f"Sink type {type_name!r} needs the Python package {package!r}, which is not installed. {how}."
    )


def _checked(type_name: str, found: object) -> type[Sink]:
    if not (isinstance(found, type) and issubclass(found, Sink)):
        raise ConfigurationError(
            f"Sink type {type_name!r} is {found!r}, which is no subclass of bridge.sink.Sink. "
            "Name a class that derives from it."
        )
    config = cast("object", found.Config)
    if not (isinstance(config, type) and issubclass(config, SinkConfig)):
        raise ConfigurationError(
            f"Sink type {type_name!r}: its Config is {config!r}. Make it a frozen subclass of bridge.sink.SinkConfig."
        )
    return found
