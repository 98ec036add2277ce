"""Implements `init`, which writes a first configuration with the chosen sinks.

The recipes in `bridge/config/recipes` are also part of the documentation. For each recipe, a test sends a record to a
simulated destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import click

from bridge.errors import BridgeError
from bridge.text import nearest

_SUFFIX = ".toml"

_HEAD = """\
# The configuration of the Scheduled Events Bridge.
# Check it: scheduled-events-bridge check-config --connect
# This file never contains secrets: a key that ends in _file names a file.

# [labels]                              # part of every record
# team = "payments"

"""

_APPROVAL = """
# Approvals are off by default: without the next table, events start at their
# NotBefore. With this rule, a reboot or redeploy that a user requests (portal,
# CLI, API) starts at once instead of after up to 15 minutes.
# [[approval.rules]]
# name = "user-initiated"
# event_sources = ["User"]
# event_types = ["Reboot", "Redeploy"]
# action = "approve"
"""


def recipe_names() -> list[str]:
    """Return the values of `--sink`, such as ``eventhubs`` and ``webhook:slack``, sorted."""
    files = resources.files("bridge.config.recipes").iterdir()
    names = [each.name.removesuffix(_SUFFIX) for each in files if each.name.endswith(_SUFFIX)]
    return sorted(name.replace("-", ":", 1) for name in names)


def recipe(name: str) -> str:
    """Return the recipe *name*. Raise click.UsageError if the recipe does not exist."""
    known = recipe_names()
    if name not in known:
        of_kind = [each for each in known if each.partition(":")[2] == name]
        hint = f" Did you mean {of_kind[0]}?" if of_kind else nearest(name, known)
        raise click.UsageError(f"Unknown recipe {name!r}.{hint} Known recipes: {', '.join(known)}.")
    file = name.replace(":", "-") + _SUFFIX
    return resources.files("bridge.config.recipes").joinpath(file).read_text(encoding="utf-8")


def configuration(sinks: Sequence[str]) -> str:
    """Return a configuration with the recipes *sinks* in the given order, without duplicates."""
    return _HEAD + "\n".join(recipe(name) for name in dict.fromkeys(sinks)) + _APPROVAL


def init(sinks: Sequence[str], output: Path | None, *, list_recipes: bool = False) -> None:
    """Print the configuration, or write it to the new file *output*."""
    if list_recipes:
        click.echo("\n".join(recipe_names()))
        return
    text = configuration(sinks or ("stdout",))
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BridgeError(f"{output} cannot be created: {error.strerror or error}.") from error
    click.echo(f"Wrote {output}. Set your own values, then run: check-config --config {output}", err=True)
