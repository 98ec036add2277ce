"""The settings that an environment variable overrides, for the manifest of a container.

A manifest determines the address of the probes and the volume of the outbox, and a configuration that is replaced
later cannot contradict the manifest. There are no other overrides. An empty variable counts as not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from bridge.config.mistakes import Problems
from bridge.config.settings import TopSettings
from bridge.config.toml import convert_value

TopT = TypeVar("TopT", bound=TopSettings)

PREFIX = "SCHEDULED_EVENTS_BRIDGE_"
#: Variable -> the key that it overrides.
OVERRIDES: Mapping[str, str] = {
    f"{PREFIX}STATUS_LISTEN": "status.listen",
    f"{PREFIX}STATE_DIRECTORY": "state.directory",
}


def set_by(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the keys that *environ* overrides, each with its variable."""
    return tuple((key, variable) for variable, key in OVERRIDES.items() if environ.get(variable))


def mistakes_in(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each variable with a value that is not valid for its key."""
    problems = Problems()
    for key, variable in set_by(environ):
        problems.extend(convert_value(environ[variable], _type_of(key), f"${variable}")[1])
    return tuple(problems.sentences)


def overridden(settings: TopT, environ: Mapping[str, str]) -> TopT:
    """Return *settings* with the values of *environ*, which `mistakes_in` has checked."""
    for key, variable in set_by(environ):
        table, _, name = key.partition(".")
        section = msgspec.structs.replace(getattr(settings, table), **{name: environ[variable]})
        settings = msgspec.structs.replace(settings, **{table: section})
    return settings


def _type_of(key: str) -> object:
    section, _, name = key.partition(".")
    struct = next(field.type for field in msgspec.structs.fields(TopSettings) if field.name == section)
    return next(field.type for field in msgspec.structs.fields(struct) if field.name == name)
