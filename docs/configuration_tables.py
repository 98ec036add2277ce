"""The reference of the configuration: every key of the agent and of each installed sink, from the code that reads it.

`explain`, `init`, `schema --config` and the reference page are made of this, so none of them can name a key that there
is not, or another default. A key's text is the one under its field (`bridge.config.settings.documented`).
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
from bridge.errors import ConfigurationError
from bridge.sink import SinkConfig

#: Path of a table, its struct, and how it is headed in the file.
_APPROVAL_TABLES: tuple[tuple[str, type[msgspec.Struct], str], ...] = (
    ("approval", ApprovalSettings, "[approval]"),
    ("approval.rules", RuleSettings, "[[approval.rules]]"),
    ("approval.remote", RemoteSettings, "[approval.remote]"),
    ("approval.remote.keys", KeySettings, "[[approval.remote.keys]]"),
)


#: Bounds that only keep a slip out, such as ten years in seconds, are no part of what a key means.
_FAR_BOUND = re.compile(r" and at most \d{9,}")


class Key(NamedTuple):
    """One key of the configuration."""

    path: str
    """Where it stands, such as ``imds.timeout_seconds`` or ``sinks.webhook.url``."""
    kind: str
    """What its value must be, in words."""
    default: str | None
    """The default as TOML; "" when there is none and none is needed, None when the key is required."""
    text: str
    """What it means, with its unit."""

    @property
    def name(self) -> str:
        """Return the key as it is written in its table."""
        return self.path.rpartition(".")[2]


class Table(NamedTuple):
    """One table of the configuration and its keys."""

    path: str
    """Such as ``imds``, ``sinks`` (what every sink has) or ``sinks.webhook`` (what it has of its own)."""
    header: str
    """The line that opens it in the file; "" for the top of the file."""
    text: str
    """What it is for."""
    keys: tuple[Key, ...]


@cache
def tables() -> tuple[Table, ...]:
    """Return every table: the top of the file, the agent's, the approvals', what sinks have, and each sink's own.

    A sink whose module cannot be imported is left out: `check-config` says why.
    """
    return (*_agent_tables(), *_approval_tables(), _common_table(), *_sink_tables())


def find(path: str) -> Table | Key | None:
    """Return what stands at *path*: a table, or one key; a sink's key that every sink has is found there too."""
    everything = tables()
    by_path: dict[str, Table | Key] = {key.path: key for table in everything for key in table.keys}
    by_path |= {table.path: table for table in everything if table.path}
    table, _, name = path.rpartition(".")
    if path not in by_path and table in by_path and table.startswith("sinks."):
        return by_path.get(f"sinks.{name}")
    return by_path.get(path)


def paths() -> list[str]:
    """Return the path of every table and key, in the order of the reference."""
    return [path for table in tables() for path in (table.path, *(key.path for key in table.keys)) if path]


def keys_of(struct: type[msgspec.Struct], prefix: str, *, stricter: Mapping[str, Any] | None = None) -> tuple[Key, ...]:
    """Return the keys that the fields of *struct* are, below *prefix*; fields that are tables are left out."""
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
    """Return the default of *field* as TOML, "" for none, and None where the key is required."""
    if field.required:
        return None
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return "" if default is None or default == "" else toml_value(default)


def toml_value(value: object) -> str:
    """Return *value*, a bool, number, text, list or empty table, as it is written in TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _is_table(field: msgspec.structs.FieldInfo) -> bool:
    """Return whether *field* is a table with a reference of its own."""
    return isinstance(field.default, msgspec.Struct) or field.name in {"approval", "rules", "remote", "keys"}


def _first_line(struct: type) -> str:
    return (struct.__doc__ or "").partition("\n")[0]


def _agent_tables() -> Iterator[Table]:
    yield Table("", "", "The top of the file, before the first [table].", keys_of(TopSettings, ""))
    for field in msgspec.structs.fields(TopSettings):
        if isinstance(field.default, msgspec.Struct):
            struct = type(field.default)
            yield Table(field.name, f"[{field.name}]", _purpose(struct), keys_of(struct, f"{field.name}."))


def _approval_tables() -> Iterator[Table]:
    for path, struct, header in _APPROVAL_TABLES:
        yield Table(path, header, _purpose(struct), keys_of(struct, f"{path}."))


def _common_table() -> Table:
    kind = Key("sinks.type", "text in quotes", None, "An installed type, or module:Class; see the tables below.")
    own = keys_of(SinkConfig, "sinks.", stricter=base_rules(SinkConfig))
    return Table("sinks", "[[sinks]]", "What every sink has, whatever its type.", (kind, *own))


def _sink_tables() -> Iterator[Table]:
    common = {key.name: key for key in _common_table().keys}
    for name in installed():
        try:
            cls = sink_class(name)
        except ConfigurationError:
            continue
        found = keys_of(cls.Config, f"sinks.{name}.", stricter=base_rules(cls.Config))
        # A common key stands here again only where this sink has another default or takes other values.
        own = tuple(key for key in found if key[1:] != common.get(key.name, key)[1:] or key.name not in common)
        yield Table(f"sinks.{name}", f'[[sinks]]\ntype = "{name}"', _first_line(cls), own)


def _purpose(struct: type) -> str:
    """Return the first line of the docstring of *struct* without the table's header, which stands beside it."""
    text = _first_line(struct).partition(": ")[2] or _first_line(struct)
    return text[:1].upper() + text[1:]
