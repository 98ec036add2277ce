"""Generates a JSON schema (draft 2020-12) for the configuration file.

The schema is meant for editors, the Helm chart, and programs that generate configurations. Because a JSON schema cannot
express every rule, such as two mutually exclusive keys, use `check-config` to find all errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from bridge.config.settings import TopSettings, documented
from bridge.config.sinks import base_rules, installed, sink_class
from bridge.sink import SinkConfig

SCHEMA_ID = "https://scheduled-events-bridge.invalid/schemas/configuration.v1.json"
_DEFS = "#/$defs/"


def configuration_schema() -> dict[str, Any]:
    """Return the schema of the complete file, including the installed sinks."""
    sinks = {name: sink_class(name).Config for name in installed()}
    structs = [TopSettings, *sinks.values()]
    roots, defs = msgspec.json.schema_components(structs, ref_template=f"{_DEFS}{{name}}")
    for struct in set(_structs(msgspec.inspect.multi_type_info(structs))):
        _close(defs[struct.__name__], struct)
    for each in defs.values():
        each["description"] = " ".join(each.get("description", "").split())
    top = defs.pop(TopSettings.__name__)
    references = dict(zip(sinks, roots[1:], strict=True))
    top["properties"]["sinks"] = {
        "description": "The destinations of records, one table each. Default: one sink of type stdout.",
        "type": "array",
        "items": _sink_item(references, defs),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **top,
        "title": "The configuration of the Scheduled Events Bridge",
        "$defs": defs,
    }


def _structs(types: Iterable[Any]) -> Iterator[type[msgspec.Struct]]:
    """Yield all structs in *types*, including the structs in their fields."""
    for each in types:
        if isinstance(each, msgspec.inspect.StructType):
            yield each.cls
            yield from _structs(field.type for field in each.fields)
        yield from _structs(getattr(each, "types", ()))  # a union
        yield from _structs([each.item_type] if hasattr(each, "item_type") else [])  # a list


def _close(schema: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    schema["additionalProperties"] = False
    rules = base_rules(struct) if issubclass(struct, SinkConfig) else {}
    texts = documented(struct)
    for name, rule in rules.items():
        default = schema["properties"][name].get("default")
        schema["properties"][name] = msgspec.json.schema(rule) | ({} if default is None else {"default": default})
    for name, key in schema["properties"].items():
        if not isinstance(key.get("default"), bool | int | float | str | list):
            key.pop("default", None)  # TOML has no null, and the keys of a table have their own defaults
        key["description"] = texts[name]


def _sink_item(references: Mapping[str, Mapping[str, Any]], defs: dict[str, Any]) -> dict[str, Any]:
    for name, reference in references.items():
        own = defs[reference["$ref"].removeprefix(_DEFS)]
        own["properties"] = {"type": {"const": name}} | own["properties"]
    return {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {
                "description": "An installed type, or module:Class.",
                "anyOf": [{"enum": list(references)}, {"type": "string", "pattern": "^[\\w.]+:[\\w.]+$"}, _INSTALLED],
            }
        },
        "allOf": [
            {"if": {"properties": {"type": {"const": name}}, "required": ["type"]}, "then": reference}
            for name, reference in references.items()
        ],
    }


#: Another machine may have other types. `check-config` reports types that are not installed.
_INSTALLED = {"type": "string", "pattern": "^[a-z][a-z0-9_-]*$"}
