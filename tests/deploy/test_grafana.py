"""The dashboard: Grafana can read it, and a real agent has data for each panel.

The tests run without Grafana. They check the JSON against Grafana's types, and run each query with promtool on the
metrics of a busy agent.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from busy_agent import busy_scrapes, series_of

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules.yml"
DASHBOARDS = ROOT / "deploy" / "grafana"
DASHBOARD = DASHBOARDS / "scheduled-events-bridge.json"

MINUTES = 40
#: Exported metrics that are intentionally in no rule and no panel.
UNUSED = {
    "process_virtual_memory_bytes": "the resident set is the meaningful memory metric",
}
#: The variables that Grafana substitutes, with everything selected.
VARIABLES = {"$job": ".+", "$instance": ".+", "$sink": ".+", "$__rate_interval": "5m"}


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def queries(panels):
    """Return (panel, query) of every target, with the variables filled in."""
    return [(panel["title"], filled(target["expr"])) for panel in panels for target in panel["targets"]]


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    hidden = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "STATE_DIRECTORY", "SCHEDULED_EVENTS_BRIDGE_CONFIG")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return busy_scrapes(tmp_path_factory.mktemp("busy"), env)


def filled(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def names_in(expressions):
    return set(re.findall(r"\b(?:scheduled_events_bridge|process)_\w+", " ".join(expressions)))


def run(*command):
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


# The panels.


def test_dashboard_queries_return_data_of_a_busy_agent(tool, tmp_path, queries, busy):
    """promtool prints the result of a query only on a mismatch, so each query expects no samples."""
    lines = series_of(busy, minutes=MINUTES)
    checks = [{"expr": query, "eval_time": f"{MINUTES - 1}m", "exp_samples": []} for _, query in queries]
    lines = ["tests:", "- interval: 1m", "  input_series:", *(f"  {line}" for line in lines)]
    path = tmp_path / "panels.yml"
    path.write_text("\n".join([*lines, f"  promql_expr_test: {json.dumps(checks)}"]) + "\n")
    _, said = run(tool("promtool"), "test", "rules", path)
    answers = re.findall(r'expr: ("(?:[^"\\]|\\.)*"), time: .*\n\s+exp: .*\n\s+got: (.*)', said)
    found = {json.loads(query) for query, got in answers if got != "nil"}
    assert [title for title, query in queries if query not in found] == [], said


def test_dashboard_and_alerts_use_every_agent_metric(package, queries, busy):
    groups = package("yaml").safe_load(RULES.read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    used = names_in([*rules, *(query for _, query in queries)])
    exported = {name for name, _ in busy[1].values}
    assert used - exported == set()
    assert {family(name) for name in exported} - {family(name) for name in used} == set(UNUSED)


def test_alert_tests_use_series_that_an_agent_exports(busy):
    exported = {(name, frozenset(dict(labels))) for name, labels in busy[1].values}
    used = set()
    for path in (PROMETHEUS / "tests").glob("*.yml"):
        for name, labels in re.findall(r"series: '(\w+)\{(.*?)\}'", path.read_text()):
            used.add((name, frozenset(re.findall(r'(\w+)="', labels)) - {"instance", "job"}))
    assert used - exported == {("up", frozenset())}


def family(name):
    return re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name)


# The format.


@pytest.mark.parametrize("name", ["scheduled-events-bridge.json", "scheduled-events-portal.json"])
def test_grafana_types_contain_every_key_of_the_dashboard(package, name):
    package("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog import plugins  # noqa: PLC0415
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415
    from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: PLC0415

    plugins.register_default_plugins()
    dashboard = json.loads((DASHBOARDS / name).read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert list(lost(dashboard, read)) == []


def lost(before, after, path=""):
    """Yield the paths of *before* that are missing or different in *after*, which can have additional defaults."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif before != after:
        yield path
