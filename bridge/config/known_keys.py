"""What a file that is refused says all the same under keys that are known: for `check-config`, which says all at once.

Only known keys are yielded: what stands under a key that nobody knows may be a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bridge.config.approval import KeySettings, RemoteSettings
from bridge.config.quoting import quotable
from bridge.config.sinks import sink_class
from bridge.errors import ConfigurationError


def known_tables(table: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each table of *table* that may name files and secrets: where it stands, and its known keys."""
    for number, sink in enumerate(_list(table.get("sinks"))):
        try:
            config = sink_class(sink["type"]).Config
        except (ConfigurationError, KeyError, TypeError):  # a type that is missing, unknown or no text
            continue
        name = sink.get("name", sink["type"])
        whose = f" (sink {quotable('name', name)})" if isinstance(name, str) else ""
        yield f"sinks[{number}]{whose}", _known(sink, config)
    approval = table.get("approval")
    remote = approval.get("remote") if isinstance(approval, Mapping) else None
    if isinstance(remote, Mapping):
        yield "approval.remote", _known(remote, RemoteSettings)
        for number, key in enumerate(_list(remote.get("keys"))):
            yield f"approval.remote.keys[{number}]", _known(key, KeySettings)


def _list(tables: object) -> list[Mapping[str, Any]]:
    """Return *tables* with an empty one in place of what is no table, so that their numbers stay."""
    return [each if isinstance(each, Mapping) else {} for each in tables] if isinstance(tables, list) else []


def _known(table: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: table.get(name) for name in struct.__struct_fields__}
