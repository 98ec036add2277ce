"""Generates the documentation of the configuration, commands, records, and drawings.

Run `python docs/generate.py` after you change a setting, a command, a record field, or a drawing. The program also
generates the JSON schemas. With ``--check``, it only lists outdated files, and exits with 1 if it finds any.

Generated parts start with ``<!-- generated: NAME -->`` or ``<!-- recipe: NAME -->``, and end with ``<!-- end -->``.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from configuration_tables import Key, Table, tables
from drawing import PALETTES
from pictures import PICTURES
from plots import PLOTS

from bridge.cli.commands import commands
from bridge.cli.help import EXAMPLES
from bridge.cli.init import recipe
from bridge.config.json_schema import configuration_schema
from bridge.config.settings import documented
from bridge.events.event import ScheduledEvent, VmIdentity, encode
from bridge.events.record import Approval, DowntimeParts, Impact, Pause, TimelineEntry, TransitionRecord, json_schema
from bridge.testing.records import sample_record

#: The most important fields of a record.
_SHORT = ("id", "transition", "evidence", "observed_at", "event", "notice_seconds", "affects_this_vm", "vm", "labels")
_SHORT_EVENT = ("event_id", "event_type", "event_status", "resources", "not_before", "duration_seconds", "description")
_WIDTH = 104
_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "record": TransitionRecord,
    "event": ScheduledEvent,
    "vm": VmIdentity,
    "approval": Approval,
    "impact": Impact,
    "pause": Pause,
    "downtime": DowntimeParts,
    "timeline": TimelineEntry,
}
ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
CHART_SCHEMA = ROOT / "deploy" / "helm" / "scheduled-events-bridge" / "values.schema.json"
_MARK = re.compile(r"^<!-- (generated|recipe): ([\w: .-]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that contain generated parts."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if _MARK.search(path.read_text(encoding="utf-8"))]


def filled(text: str) -> str:
    """Return the page *text* with updated generated parts."""
    return _MARK.sub(_part, text)


def _part(found: re.Match[str]) -> str:
    kind, name = found[1], found[2]
    if kind == "recipe":
        body = f"```toml\n{recipe(name.replace('-', ':', 1)).strip()}\n```"
    else:
        title, _, argument = name.partition(" ")
        body = _PARTS[title](argument)
    gap = "\n" if body.startswith("#") else ""  # a heading needs blank lines around it
    return f"<!-- {kind}: {name} -->\n{gap}{body.strip()}\n{gap}<!-- end -->"


def _configuration(_: str) -> str:
    """Return every table of the configuration under a separate heading."""
    parts = []
    for table in tables():
        title = f"`{table.path}`" if table.path else "The top of the file"
        header = f"\n```toml\n{table.header}\n```\n" if table.header else ""
        parts.append(f"## {title}\n\n{table.text}\n{header}\n{_keys(table)}")
    return "\n\n".join(parts)


def _keys_of(path: str) -> str:
    return _keys(next(table for table in tables() if table.path == path))


def _keys(table: Table) -> str:
    rows = [f"| `{key.name}` | {_default(key)} | {_cell(key.kind)} | {_cell(key.text)} |" for key in table.keys]
    return "\n".join(["| key | default | value | meaning |", "|---|---|---|---|", *rows])


def _default(key: Key) -> str:
    return "required" if key.default is None else f"`{key.default}`" if key.default else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _commands(_: str) -> str:
    """Return a section for each command: its usage, help, options, and examples."""
    parts = []
    for path, command in _leaves(commands, ()):
        name = " ".join(path)
        usage = " ".join([name, *(_argument(each) for each in command.params if isinstance(each, click.Argument))])
        examples = "\n\nExamples:\n\n" + "\n".join(f"- `{each}`" for each in EXAMPLES[name]) if name in EXAMPLES else ""
        options = [each for each in command.params if isinstance(each, click.Option)]
        texts = [f"Usage: `{usage}`", *inspect.cleandoc(command.help or "").split("\n\n")]
        help_text = "\n\n".join(textwrap.fill(_cell(text), _WIDTH, break_on_hyphens=False) for text in texts)
        parts.append(f"### {name}\n\n{help_text}\n\n{_options(options)}{examples}")
    return "\n\n".join(parts)


def _argument(argument: click.Argument) -> str:
    if isinstance(argument.type, click.Choice):
        return "|".join(map(str, argument.type.choices))
    if argument.metavar is not None:
        return argument.metavar
    word = (argument.name or "").upper()
    return word if argument.required else f"[{word}]"


def _options(options: list[click.Option]) -> str:
    rows = [f"| {_option(each)} | {_default_of(each)} | {_cell(each.help or '')} |" for each in options]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) if rows else "No options."


def _option(option: click.Option) -> str:
    """Return the names of *option*, longest first, with a placeholder for its value."""
    names = sorted((*option.opts, *option.secondary_opts), key=len, reverse=True)
    if option.is_flag:
        value = ""
    elif isinstance(option.type, click.Choice):
        value = f" {'|'.join(map(str, option.type.choices))}"
    else:
        value = f" {option.metavar or option.type.name.partition(' ')[0].upper()}"
    return ", ".join(f"`{name}{value}`".replace("|", "\\|") for name in names)


def _default_of(option: click.Option) -> str:
    is_shown = not option.is_flag and option.show_default and isinstance(option.default, (str, int, float))
    return f"`{option.default}`" if is_shown else ""


def _leaves(group: click.Group, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        inner = (*path, name)
        is_group = isinstance(command, click.Group)
        found += [] if is_group and not command.invoke_without_command else [(inner, command)]
        found += _leaves(command, inner) if is_group else []
    return found


def _record(which: str) -> str:
    """Return a sample record as JSON.

    If *which* is "short", return only the most important fields.
    """
    value = msgspec.json.decode(encode(sample_record()))
    if which == "short":
        value = {key: value[key] for key in _SHORT} | {
            "event": {key: value["event"][key] for key in _SHORT_EVENT},
            "vm": {"name": value["vm"]["name"]},
        }
    return f"```json\n{_pretty(value)}\n```"


def _pretty(value: dict[str, Any]) -> str:
    """Return *value* as JSON with one top-level key per line.

    Nested objects are wrapped at the page width.
    """
    lines = []
    for key, item in value.items():
        text = json.dumps(item, ensure_ascii=False)
        if isinstance(item, dict) and len(text) > _WIDTH:
            pairs = [f"{json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}" for name, each in item.items()]
            text = "{\n" + ",\n".join(f"    {line}" for line in _joined(pairs)) + "\n  }"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _joined(parts: list[str]) -> list[str]:
    """Join *parts* with commas, and wrap the lines at the page width."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < _WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


def _fields(name: str) -> str:
    struct = _STRUCTS[name]
    texts = {field: text.replace("None", "null") for field, text in documented(struct).items()}
    rows = [f"| `{field.encode_name}` | {_cell(texts[field.name])} |" for field in msgspec.structs.fields(struct)]
    return "\n".join(["| field | meaning |", "|---|---|", *rows])


_PARTS: dict[str, Callable[[str], str]] = {
    "configuration": _configuration,
    "keys": _keys_of,
    "commands": _commands,
    "record": _record,
    "fields": _fields,
}


def with_configuration(text: str) -> str:
    """Insert the configuration schema into *text*, the Helm chart's values schema.

    Helm uses JSON Schema draft 7, which has `definitions` instead of `$defs`.
    """
    chart = json.loads(text)
    made = json.loads(json.dumps(configuration_schema()).replace("#/$defs/", "#/definitions/"))
    definitions = made.pop("$defs")
    configuration = {key: made[key] for key in made if key not in {"$schema", "$id"}}
    own = {name: each for name, each in chart["definitions"].items() if not name[0].isupper()}
    chart["definitions"] = own | {"Configuration": configuration} | definitions
    return json.dumps(chart, indent=2, ensure_ascii=False) + "\n"


#: Generated files with the output of the command `schema`.
_FILES: dict[Path, Callable[[], dict[str, Any]]] = {
    ROOT / "docs" / "reference" / "record.schema.json": json_schema,
    ROOT / "docs" / "reference" / "configuration.schema.json": configuration_schema,
}


def wanted() -> dict[Path, str]:
    """Return the correct text of every generated file and of every page with generated parts."""
    texts = {path: filled(path.read_text(encoding="utf-8")) for path in pages()}
    texts |= {path: f"{json.dumps(schema(), indent=2)}\n" for path, schema in _FILES.items()}
    for name, draw in (PICTURES | PLOTS).items():
        texts |= {IMAGES / f"{name}-{palette}.svg": draw().svg(palette) for palette in PALETTES}
    return texts | {CHART_SCHEMA: with_configuration(CHART_SCHEMA.read_text(encoding="utf-8"))}


def differing() -> list[Path]:
    """Return the files that are missing or outdated."""
    return [path for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> int:
    """Update the outdated files, or list them if --check is given."""
    stale = differing()
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is outdated: run python docs/generate.py\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
