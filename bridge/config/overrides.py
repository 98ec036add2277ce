"""The settings that a variable of the environment sets before the file does: what a container's manifest must know.

A manifest says where the probes ask and which volume holds the outbox. A configuration that somebody exchanges need not
repeat them, and cannot contradict them. There are only these. A variable that is empty counts as not set. The name of
the VM is not among them: what a manifest could give is a node's name, and Azure calls the VM by another.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

import msgspec

from bridge.config.mistakes import Problems
from bridge.config.settings import Settings
from bridge.config.toml import convert_value
from bridge.errors import ConfigurationError

PREFIX = "SCHEDULED_EVENTS_BRIDGE_"
#: Variable -> the key that it sets.
OVERRIDES: Mapping[str, str] = {
    f"{PREFIX}STATUS_LISTEN": "status.listen",
    f"{PREFIX}STATE_DIRECTORY": "state.directory",
}


def set_by(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the keys that *environ* sets, each with the variable that does."""
    return tuple((key, variable) for variable, key in OVERRIDES.items() if environ.get(variable))


def mistakes_in(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each variable whose value its key may not have."""
    problems = Problems()
    for key, variable in set_by(environ):
        problems.extend(convert_value(environ[variable], _type_of(key), f"${variable}")[1])
    return tuple(problems.sentences)


def overridden(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return *settings* with what *environ* sets in place of the file; raise ConfigurationError for a wrong value."""
    mistakes = mistakes_in(environ)
    if mistakes:
        raise ConfigurationError(*mistakes)
    for key, variable in set_by(environ):
        table, _, name = key.partition(".")
        section = msgspec.structs.replace(getattr(settings, table), **{name: environ[variable]})
        settings = msgspec.structs.replace(settings, **{table: section})
    return msgspec.structs.replace(settings, overrides=set_by(environ))


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that sets nothing and looks like one that would.

    Others of the same beginning are passed over: Kubernetes makes variables of the names of services.
    """
    known = {variable.removeprefix(PREFIX): variable for variable in OVERRIDES}
    found = []
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        is_like_ours = name not in (variable, *known)
        near = get_close_matches(name, known, n=1, cutoff=0.7) if is_like_ours else []
        found += [f"${variable} sets nothing. Did you mean ${known[each]}?" for each in near]
    return found


def _type_of(key: str) -> object:
    """Return what the value of *key* must be."""
    table, _, name = key.partition(".")
    section = next(field.type for field in msgspec.structs.fields(Settings) if field.name == table)
    return next(field.type for field in msgspec.structs.fields(section) if field.name == name)
