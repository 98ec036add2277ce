"""From the name of a sink type to its class.

The project's own sinks and anybody else's come by the same road, an entry point of the group
``scheduled_events_bridge.sinks``; ``module:Class`` does without packaging. Listing what is installed imports nothing,
and only the type that was asked for is imported: a sink that is not configured costs no memory, and its missing SDK
harms nobody.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from bridge.config.quoting import quotable
from bridge.errors import ConfigurationError, UnknownSinkType
from bridge.sink import Sink, SinkConfig
from bridge.text import nearest

GROUP = "scheduled_events_bridge.sinks"

#: Packages that an extra of this distribution brings, so that a missing one is named with its cure.
EXTRAS = {"apprise": "apprise", "jinja2": "template", "aiohttp": "websocket"}


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
    return f"No sink type is called {quotable('type', type_name)}.{nearest(type_name, names)} Installed: {listed}."


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
    how = (
        f"It comes with the extra [{extra}]: in the checkout, pip install '.[{extra}]'"
        if extra
        else f"Install the package that brings {package!r}"
    )
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
