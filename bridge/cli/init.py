"""`init`: a first configuration, commented, with the sinks that were asked for.

What it writes is put together from the recipes in `bridge/config/recipes`, which the documentation shows too, so a
configuration that comes from here has been tried against a stub of the real service.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import click

from bridge.errors import BridgeError
from bridge.text import nearest

_SUFFIX = ".toml"
_MODE = 0o644  # it holds no secret; the service's user must be able to read it

_HEAD = """\
# The configuration of the Scheduled Events Bridge.
# Check it:           scheduled-events-bridge check-config --connect
# What a key means:   scheduled-events-bridge explain sinks.webhook.url
# Secrets never stand in this file: a key that ends in _file names a file.

# [labels]                              # stand in every record
# team = "payments"

"""

_APPROVAL = """
# Nothing is approved unless you say so: without the next table events start at
# their NotBefore. This rule lets a reboot or redeploy that somebody asked for
# (portal, CLI, API) start at once instead of after up to 15 minutes.
# [[approval.rules]]
# name = "user-initiated"
# event_sources = ["User"]
# action = "approve"
"""


def recipe_names() -> list[str]:
    """Return what `--sink` takes, such as ``eventhubs`` and ``webhook:slack``, sorted."""
    files = resources.files("bridge.config.recipes").iterdir()
    return sorted(_name(each.name) for each in files if each.name.endswith(_SUFFIX))


def recipe(name: str) -> str:
    """Return the recipe called *name*; raise click.UsageError when there is none."""
    known = recipe_names()
    if name not in known:
        of_kind = [each for each in known if each.partition(":")[2] == name]
        hint = f" Did you mean {of_kind[0]}?" if of_kind else nearest(name, known)
        raise click.UsageError(f"There is no recipe {name!r}.{hint} Known: {', '.join(known)}.")
    file = name.replace(":", "-") + _SUFFIX
    return resources.files("bridge.config.recipes").joinpath(file).read_text(encoding="utf-8")


def configuration(sinks: Sequence[str]) -> str:
    """Return a whole configuration with the recipes *sinks*, each once, in the order given."""
    return _HEAD + "\n".join(recipe(name) for name in dict.fromkeys(sinks)) + _APPROVAL


def write_configuration(sinks: Sequence[str], output: Path | None) -> None:
    """Print the configuration with the recipes *sinks*, or make the file *output* of it; none is ever overwritten."""
    text = configuration(sinks)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except FileExistsError:
        raise BridgeError(f"{output} exists already. Nothing is overwritten: name another file.") from None
    except OSError as error:
        raise BridgeError(f"{output} cannot be made: {error.strerror or error}.") from error
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    click.echo(f"Wrote {output}. Put your own values into it, then: check-config --config {output}", err=True)


def _name(file: str) -> str:
    return file.removesuffix(_SUFFIX).replace("-", ":", 1)
