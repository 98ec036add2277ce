"""Microsoft's language service accepts the KQL, and the tables match the schema of the record."""

import json
import os
import re
import subprocess
from pathlib import Path

import doc_pages
import pytest
from kql.files import Kql, header_columns

from bridge.events.record import json_schema

pytestmark = pytest.mark.deploy

_CHECK = Path(__file__).with_name("kusto_check.cjs")
_PACKAGE = "@kusto/language-service-next"
_PLATFORMS = ("data-explorer", "log-analytics")
_KUSTO_TYPES = {
    "integer": {"int", "long"},
    "number": {"real"},
    "boolean": {"bool"},
    "string": {"string", "datetime"},
    "array": {"dynamic"},
    "object": {"dynamic"},
}


@pytest.fixture(scope="module")
def kql(deploy):
    return Kql(deploy / "azure" / "kql")


_SOURCE = {"source": "(TimeGenerated: datetime, RawData: string, Properties: dynamic)"}


@pytest.fixture(scope="module")
def judged(kql, tool):
    """Return the problems that the language service finds. The service takes seconds to load, so it runs once."""
    texts = {**kql.queries, "setup": kql.setup}
    questions = {name: {**platform.schema, "texts": texts} for name, platform in kql.platforms.items()}
    page = doc_pages.marked(doc_pages.page("docs/howto/log-analytics.md"), "kql: look")
    questions["log-analytics"]["texts"] = {**texts, "page": page}
    questions["transform"] = {"tables": _SOURCE, "texts": {"transform": kql.transform}}
    return _ask(tool("node"), questions)


def _ask(node, questions):
    found = subprocess.run([node, "-p", f"require.resolve('{_PACKAGE}')"], capture_output=True, text=True, check=False)
    if found.returncode:
        sentence = f"node does not find {_PACKAGE}: npm install it and set NODE_PATH"
        pytest.fail(sentence) if os.environ.get("DEPLOY_TOOLS") == "required" else pytest.skip(sentence)
    done = subprocess.run([node, str(_CHECK)], input=json.dumps(questions), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _problems(blocks):
    return [problem for block in blocks for problem in block["problems"]]


@pytest.mark.parametrize("platform", _PLATFORMS)
def test_queries_are_valid_and_return_the_documented_columns(kql, judged, platform):
    blocks = {name: judged[platform][name] for name in kql.queries}
    assert {name: _problems(each) for name, each in blocks.items()} == {name: [] for name in kql.queries}
    for name, each in blocks.items():
        # A blank line would end the query in the web interface: half of it would run.
        assert [block["kind"] for block in each] == ["Query"], name
        assert [column for column, _ in each[0]["columns"]] == header_columns(kql.queries[name]), name


def test_management_commands_are_valid(judged):
    blocks = judged["data-explorer"]["setup"]
    assert _problems(blocks) == []
    assert [block["kind"] for block in blocks] == ["Command"] * 4


def test_documented_workspace_query_is_valid(judged):
    blocks = judged["log-analytics"]["page"]
    assert _problems(blocks) == []
    [block] = blocks
    assert [column for column, _ in block["columns"]][:3] == ["observed_at", "vm_name", "event_type"]


#: Objects that stay one dynamic column, because most records do not have them.
_WHOLE = {"impact"}


def _leaves(schema, name, prefix="$.data"):
    """Yield (path, JSON types) of every field of *name*, with nested objects expanded."""
    for field, value in schema["$defs"][name]["properties"].items():
        options = [option for option in value.get("anyOf", [value]) if option.get("type") != "null"]
        reference = options[0].get("$ref", "").rpartition("/")[2]
        if field in _WHOLE:
            yield f"{prefix}.{field}", {"object"}
        elif "properties" in schema["$defs"].get(reference, {}):
            yield from _leaves(schema, reference, f"{prefix}.{field}")
        else:
            yield f"{prefix}.{field}", {option.get("type", "string") for option in options}


def test_mapping_contains_exactly_the_fields_of_the_record(kql):
    table = kql.platforms["data-explorer"].columns
    assert list(kql.mapping) == list(table)
    leaves = dict(_leaves(json_schema(), "TransitionRecord"))
    paths = {column: path for column, path in kql.mapping.items() if column != "enqueued_at"}
    assert sorted(paths.values()) == sorted(leaves)
    assert kql.mapping["enqueued_at"] == "$.x-opt-enqueued-time"
    for column, path in paths.items():
        # What may be of several types (an incarnation) is text.
        wanted = {"string"} if len(leaves[path]) > 1 else _KUSTO_TYPES[next(iter(leaves[path]))]
        assert table[column] in wanted, column


def test_transformation_fills_the_workspace_table(kql, judged):
    blocks = judged["transform"]["transform"]
    assert _problems(blocks) == []
    assert dict(blocks[0]["columns"]) == kql.platforms["log-analytics"].columns


def test_transformation_and_mapping_read_the_same_fields(kql):
    """The engine and the language service accept unknown paths. The test above checks the paths of the mapping."""
    read = dict(
        re.findall(
            r"^    (\w+) = (?:\w+\()?((?:record|event|vm|approval)\.[\w.]+)",
            kql.transform.replace('record["timeline"]', "record.timeline"),  # a keyword of KQL
            re.MULTILINE,
        )
    )
    del read["TimeGenerated"]
    wanted = {column: path.removeprefix("$.data.") for column, path in kql.mapping.items() if column != "enqueued_at"}
    assert {column: path.removeprefix("record.") for column, path in read.items()} == wanted
