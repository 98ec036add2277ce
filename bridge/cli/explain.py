"""`explain`: what a key of the configuration means, offline, from the code that reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from bridge.cli.terminal import styled, with_label, wrapped
from bridge.config.reference import Key, Table, find, paths, tables
from bridge.errors import BridgeError
from bridge.text import nearest

_INDENT = "    "


def explain(path: str | None) -> None:
    """Print the reference of the table or key at *path*; without one, a line for each table."""
    for line in _overview() if path is None else _about(path.strip("[] ")):
        click.echo(line)


def _overview() -> Iterator[str]:
    found = tables()
    width = max(len(table.path) for table in found)
    for table in found:
        name = table.path or "(top)"
        yield from with_label(wrapped(table.text, first=f"{name:<{width}}  ", indent=" " * (width + 2)), name)
    yield ""
    yield "explain TABLE lists its keys, explain TABLE.KEY says what one means."


def _about(path: str) -> Iterable[str]:
    found = find(path)
    if found is None:
        known = paths()
        ends_so = [each for each in known if _last(each) == path]
        hint = f" Did you mean {' or '.join(ends_so)}?" if ends_so else nearest(path, [*known, *map(_last, known)])
        raise BridgeError(f"No table or key of the configuration is called {path!r}.{hint} `explain` lists the tables.")
    return _table(found) if isinstance(found, Table) else _key(found)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _table(table: Table) -> Iterator[str]:
    for line in table.header.split("\n"):
        yield styled(line, bold=True)
    yield from wrapped(table.text)
    for key in table.keys:
        yield ""
        yield from _key(key)
    if table.path.startswith("sinks."):
        yield ""
        yield "It has the keys of every sink too: explain sinks"


def _key(key: Key) -> Iterator[str]:
    default = "required" if key.default is None else f"default {key.default}" if key.default else "optional"
    yield from with_label(wrapped(f"{key.path}  ({key.kind}; {default})", first="", indent=_INDENT), key.path)
    yield from wrapped(key.text, first=_INDENT, indent=_INDENT)
