"""Compares the reference pages with the code: commands, keys, exit codes, transitions, and generated parts."""

import importlib.util
import json
import re
import sys

import doc_pages
import jsonschema
import pytest
from configuration_tables import tables

from bridge.approval.rules import first_match
from bridge.cli import commands
from bridge.config.loader import read
from bridge.config.secret_keys import CREDENTIAL_VARIABLES
from bridge.events.otel_resource import CONVENTIONAL_LABELS
from bridge.events.record import Evidence, Transition
from bridge.exit_codes import ExitCode
from bridge.testing.records import sample_event, sample_record
from sinks.otlp.encoding import log_record
from sinks.severity import look_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = doc_pages.ROOT
APPROVALS = doc_pages.page("docs/concepts/approvals.md")
README = doc_pages.page("README.md")
BOOK = doc_pages.book()
_UNITS = {"_seconds": "second", "_bytes": "byte"}


def _section(heading):
    return doc_pages.section(BOOK, heading)


def _rows(text):
    """Return the cells of each table row of *text*."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def _quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def _commands():
    """Return all commands by their full name, such as "outbox list"."""
    found = {}
    for name, command in commands.commands.commands.items():
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {each}": inner[each] for each in inner}
    return found


def _generator():
    """Return the program that writes the generated parts of the pages."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date():
    generator = _generator()
    assert len(generator.pages()) > 10
    assert generator.differing() == [], "run: python docs/generate.py"


def test_chart_schema_contains_the_current_configuration():
    generator = _generator()
    text = generator.CHART_SCHEMA.read_text(encoding="utf-8")
    assert generator.with_configuration(text) == text, "run: python docs/generate.py"
    schema = json.loads(text)
    values = {"image": {"repository": "x"}}
    jsonschema.validate(values | {"config": tomllib.loads(doc_pages.blocks(README, "toml")[0].text)}, schema)
    with pytest.raises(jsonschema.ValidationError, match="urll"):
        jsonschema.validate(values | {"config": {"sinks": [{"type": "webhook", "urll": "x"}]}}, schema)


def test_configuration_page_lists_every_key_with_its_unit():
    page = doc_pages.page("docs/reference/configuration.md")
    for table in tables():
        for key in table.keys:
            assert f"| `{key.name}` |" in page, key.path
            for ending, unit in _UNITS.items():
                if key.name.endswith(ending):
                    assert unit in f"{key.text} {key.kind}".lower(), f"{key.path} names no {unit}"


def test_documented_sample_rules_approve_user_events_and_short_freezes():
    block = APPROVALS.partition("<!-- rules-of-the-sample -->\n```toml\n")[2].partition("```")[0]
    rules = read(tomllib.loads(block)).approval.rules

    def matched(event_type, source, duration_seconds):
        event = sample_event(event_type=event_type, event_source=source, duration_seconds=duration_seconds)
        rule = first_match(rules, event, vm_name="WestNO_0")
        return None if rule is None else (rule.name, rule.action)

    assert matched("Reboot", "User", None) == ("user-initiated", "approve")
    assert [matched("Freeze", "Platform", seconds) for seconds in (0, 8)] == [("short-freeze", "approve")] * 2
    assert [matched("Freeze", "Platform", seconds) for seconds in (9, None)] == [None, None]
    assert matched("Reboot", "Platform", 5) is None


def test_documented_commands_match_the_code():
    rows = _rows(_section("Commands").split("| exit code |")[0])
    assert {_quoted(row[0])[0] for row in rows if _quoted(row[0])} == set(_commands())


def test_documented_exit_codes_match_the_code():
    rows = _rows(_section("Commands").partition("| exit code |")[2])
    documented_codes = {int(row[0]) for row in rows if row[0].isdecimal()}
    assert documented_codes == set(ExitCode)


def test_documented_severities_match_the_sinks():
    found = {}
    for record, severity, icon, _, otlp, *_ in _rows(doc_pages.section(BOOK, "Severity, icon, and color", level=3))[2:]:
        _, _, types = record.partition("active: ")
        for transition in ("scheduled", "started", "updated") if types else _quoted(record):
            for event_type in types.split(", ") if types else ("Freeze", "Preempt"):
                sent = sample_record(transition=Transition(transition), event=sample_event(event_type=event_type))
                look = look_of(sent)
                assert (severity, icon, otlp) == (look.severity.value, look.icon, log_record(sent).severity_text)
                found[transition, event_type] = severity
    assert {transition for transition, _ in found} == {each.value for each in Transition}
    assert found["scheduled", "other types"] == "warning"


def test_every_transition_and_evidence_is_documented():
    text = _section("Got paged? How to read a record")
    missing = [word.value for word in (*Transition, *Evidence) if f"`{word.value}`" not in text]
    assert missing == []


@pytest.mark.parametrize(
    "names", [CREDENTIAL_VARIABLES, CONVENTIONAL_LABELS], ids=["withheld variables", "OTLP labels"]
)
def test_sinks_page_lists_withheld_variables_and_otlp_labels(names):
    shown = doc_pages.page("docs/reference/sinks.md")
    assert [name for name in sorted(names) if f"`{name}`" not in shown] == []
