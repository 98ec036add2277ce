"""Microsoft's own language service has nothing against the KQL, and the tables are the record's schema."""

from __future__ import annotations

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
#: What a workspace keeps for itself (Azure Monitor, "Add or delete tables and columns").
_RESERVED = {"id", "billedsize", "isbillable", "invalidtimegenerated", "tenantid", "title", "type", "uniqueid"}
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


#: What the language service must have something against, and a word of what it says.
_WRONG = {
    "column": ("ScheduledEventRecords(1d) | where event_kind == 'Freeze'", "event_kind"),
    "type": ("ScheduledEventRecords(1d) | where vm_name > 1", "operand types string and long"),
    "function": ("ScheduledEventRecord(1d)", "ScheduledEventRecord"),
    "operator": ("ScheduledEventRecords(1d) | summarise count()", "Query operator expected"),
    "column in a command": (".create-or-alter function F() { ScheduledEvents | project nothing }", "nothing"),
    "command": (".create-or-altar table T (a: string)", "Expected"),
}
_SOURCE = {"source": "(TimeGenerated: datetime, RawData: string, Properties: dynamic)"}


@pytest.fixture(scope="module")
def shown(deploy):
    """Return what the page beside the files shows: a command, and a query."""
    page = (deploy / "azure" / "kql" / "README.md").read_text()
    # "database" is what kusto_check.cjs calls the only one that it knows
    return re.findall(r"^```kusto\n(.*?)^```$", page.replace("DATABASE", "database"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def workspace_query():
    """Return what the page of the workspace has one look with: the block "kql: look"."""
    return doc_pages.marked(doc_pages.page("docs/howto/log-analytics.md"), "kql: look")


@pytest.fixture(scope="module")
def judged(kql, shown, workspace_query, tool):
    """Return what the language service says of every text, asked once: it takes seconds to load."""
    wrong = {name: text for name, (text, _) in _WRONG.items()}
    texts = {**kql.queries, **wrong, "setup": kql.setup, "all columns": "ScheduledEventRecords(1d)"}
    questions = {name: {**platform.schema, "texts": texts} for name, platform in kql.platforms.items()}
    questions["data-explorer"]["texts"] = {**texts, **{f"shown {number}": text for number, text in enumerate(shown)}}
    questions["log-analytics"]["texts"] = {**texts, "page": workspace_query}
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
def test_queries_are_right_and_give_the_columns_of_their_header(kql, judged, platform):
    blocks = {name: judged[platform][name] for name in kql.queries}
    assert {name: _problems(each) for name, each in blocks.items()} == {name: [] for name in kql.queries}
    for name, each in blocks.items():
        # A blank line would end the query in the web interface: half of it would run.
        assert [block["kind"] for block in each] == ["Query"], name
        assert [column for column, _ in each[0]["columns"]] == header_columns(kql.queries[name]), name


def test_function_gives_the_same_columns_on_both_platforms(judged):
    columns = []
    for platform in _PLATFORMS:
        blocks = judged[platform]["all columns"]
        assert _problems(blocks) == []
        only_there = {"TimeGenerated", "enqueued_at"}
        columns.append({name: kind for name, kind in blocks[0]["columns"] if name not in only_there})
    assert columns[0] == columns[1]
    assert {"record_id", "received_at", "vm_key"} <= set(columns[0])


@pytest.mark.parametrize("name", _WRONG)
def test_language_service_finds_what_is_wrong(judged, name):
    [problem, *_] = _problems(judged["data-explorer"][name])
    assert problem.startswith("Error")
    assert _WRONG[name][1] in problem


def test_commands_are_right(judged):
    blocks = judged["data-explorer"]["setup"]
    assert _problems(blocks) == []
    assert [block["kind"] for block in blocks] == ["Command"] * 4


def test_what_the_page_shows_is_right(judged, shown):
    blocks = [block for number in range(len(shown)) for block in judged["data-explorer"][f"shown {number}"]]
    assert _problems(blocks) == []
    assert [block["kind"] for block in blocks] == ["Command", "Query"]
    [policy] = json.loads(re.search(r"policy managed_identity '(.*)'$", shown[0], re.MULTILINE)[1])
    assert policy == {"ObjectId": "system", "AllowedUsages": "DataConnection"}


def test_query_of_the_workspace_page_is_right(judged):
    blocks = judged["log-analytics"]["page"]
    assert _problems(blocks) == []
    [block] = blocks
    assert [column for column, _ in block["columns"]][:3] == ["observed_at", "vm_name", "event_type"]


def test_policy_is_json(kql):
    policy = json.loads(re.search(r"policy ingestionbatching\s+```(.*?)```", kql.setup, re.DOTALL)[1])
    assert policy["MaximumBatchingTimeSpan"] == "00:00:30"


def _leaves(schema, name, prefix="$.data"):
    """Yield (path, JSON types) of every field of *name* that is no object of a shape of its own."""
    for field, value in schema["$defs"][name]["properties"].items():
        options = [option for option in value.get("anyOf", [value]) if option.get("type") != "null"]
        reference = options[0].get("$ref", "").rpartition("/")[2]
        if "properties" in schema["$defs"].get(reference, {}):
            yield from _leaves(schema, reference, f"{prefix}.{field}")
        else:
            yield f"{prefix}.{field}", {option.get("type", "string") for option in options}


def test_mapping_takes_every_field_of_the_record_and_no_other(kql):
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


def test_transformation_reads_what_the_mapping_reads(kql):
    """The engine and the language service accept a path that no record has; the mapping's were checked above."""
    read = dict(
        re.findall(r"^    (\w+) = (?:\w+\()?((?:record|event|vm|approval)\.[\w.]+)", kql.transform, re.MULTILINE)
    )
    del read["TimeGenerated"]
    wanted = {column: path.removeprefix("$.data.") for column, path in kql.mapping.items() if column != "enqueued_at"}
    assert {column: path.removeprefix("record.") for column, path in read.items()} == wanted


def test_transformation_keeps_to_one_row_at_a_time(kql):
    """A data collection rule takes no operator that looks at several rows."""
    code = "\n".join(line for line in kql.transform.splitlines() if not line.startswith("//"))
    assert set(re.findall(r"^\| ([\w-]+)", code, re.MULTILINE)) <= {"where", "extend", "project"}


def test_workspace_columns_have_names_that_are_allowed(kql):
    platform = kql.platforms["log-analytics"]
    assert platform.table.endswith("_CL")
    for name in platform.columns:
        assert re.fullmatch(r"[A-Za-z]\w{0,44}", name), name
        assert name.lower() not in _RESERVED, name
    workspace = {name: kind for name, kind in platform.columns.items() if name != "TimeGenerated"}
    explorer = {name: kind for name, kind in kql.platforms["data-explorer"].columns.items() if name != "enqueued_at"}
    assert workspace == explorer
