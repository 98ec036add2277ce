"""Builds the tables of the configuration reference, for the agent and each sink.

The tables are generated from the configuration structs. The description of each key is the docstring of the
corresponding field (`bridge.config.settings.documented`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from bridge.config.approval import ApprovalSettings, KeySettings, RemoteSettings, RuleSettings
from bridge.config.mistakes import in_words
from bridge.config.settings import TopSettings, documented
from bridge.config.sinks import base_rules, installed, sink_class
from bridge.config.telemetry import TelemetrySettings
from bridge.sink import SinkConfig

#: Path, struct, and header of each table.
_OPTIONAL_TABLES: tuple[tuple[str, type[msgspec.Struct], str], ...] = (
    ("telemetry", TelemetrySettings, "[telemetry]"),
    ("approval", ApprovalSettings, "[approval]"),
    ("approval.rules", RuleSettings, "[[approval.rules]]"),
    ("approval.remote", RemoteSettings, "[approval.remote]"),
    ("approval.remote.keys", KeySettings, "[[approval.remote.keys]]"),
)


#: Bounds with nine or more digits only catch typing errors, so the reference omits these bounds.
_FAR_BOUND = re.compile(r" and at most \d{9,}")


class Key(NamedTuple):
    """One key of the configuration."""

    path: str
    """The path of the key, such as ``imds.timeout_seconds`` or ``sinks.webhook.url``."""
    kind: str
    """The values that the key accepts."""
    default: str | None
    """The default as TOML, "" if an optional key has no default, or None if the key is required."""
    text: str
    """The meaning of the key, with its unit."""

    @property
    def name(self) -> str:
        """Return the name of the key in its table."""
        return self.path.rpartition(".")[2]


class Table(NamedTuple):
    """One table of the configuration and its keys."""

    path: str
    """The path of the table: ``imds``, ``sinks`` for the keys of all sinks, or ``sinks.webhook`` for one type."""
    header: str
    """The header of the table in the file, or "" for the top of the file."""
    text: str
    """The purpose of the table."""
    keys: tuple[Key, ...]


@cache
def tables() -> tuple[Table, ...]:
    """Return the tables for the agent, for approvals, for all sinks, and for each sink type."""
    return (*_agent_tables(), *_optional_tables(), _common_table(), *_sink_tables())


def keys_of(struct: type[msgspec.Struct], prefix: str, *, stricter: Mapping[str, Any] | None = None) -> tuple[Key, ...]:
    """Return a key for each field of *struct* that is not a table."""
    texts = documented(struct)
    rules = stricter or {}
    return tuple(
        Key(
            f"{prefix}{field.name}",
            _FAR_BOUND.sub("", in_words(rules.get(field.name, field.type))),
            default_of(field),
            texts[field.name],
        )
        for field in msgspec.structs.fields(struct)
        if not _is_table(field)
    )


def default_of(field: msgspec.structs.FieldInfo) -> str | None:
    """Return the default of *field* as TOML, "" without one, None if it is required."""
    if field.required:
        return None
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return "" if default is None or default == "" else toml_value(default)


def toml_value(value: object) -> str:
    """Return *value* as TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _is_table(field: msgspec.structs.FieldInfo) -> bool:
    """Return whether *field* is a separate table."""
    return isinstance(field.default, msgspec.Struct) or field.name in {
        "approval",
        "telemetry",
        "rules",
        "remote",
        "keys",
    }


def _description(struct: type) -> str:
    return " ".join((struct.__doc__ or "").split())


def _agent_tables() -> Iterator[Table]:
    yield Table("", "", "The top of the file, before the first [table].", keys_of(TopSettings, ""))
    for field in msgspec.structs.fields(TopSettings):
        if isinstance(field.default, msgspec.Struct):
            struct = type(field.default)
            yield Table(field.name, f"[{field.name}]", _purpose(struct), keys_of(struct, f"{field.name}."))


def _optional_tables() -> Iterator[Table]:
    for path, struct, header in _OPTIONAL_TABLES:
        yield Table(path, header, _purpose(struct), keys_of(struct, f"{path}."))


def _common_table() -> Table:
    kind = Key("sinks.type", "text in quotes", None, "An installed type, or module:Class. See the tables below.")
    own = keys_of(SinkConfig, "sinks.", stricter=base_rules(SinkConfig))
    return Table("sinks", "[[sinks]]", "The keys of every sink.", (kind, *own))


def _sink_tables() -> Iterator[Table]:
    common = {key.name: key for key in _common_table().keys}
    for name in installed():
        cls = sink_class(name)
        found = keys_of(cls.Config, f"sinks.{name}.", stricter=base_rules(cls.Config))
        # A common key is repeated only if this sink type has another default or accepts other values.
        own = tuple(key for key in found if key[1:] != common.get(key.name, key)[1:] or key.name not in common)
        yield Table(f"sinks.{name}", f'[[sinks]]\ntype = "{name}"', _description(cls), own)


def _purpose(struct: type) -> str:
    """Return the first line of the docstring of *struct* without the header of the table."""
    text = _description(struct).partition(": ")[2] or _description(struct)
    return text[:1].upper() + text[1:]
