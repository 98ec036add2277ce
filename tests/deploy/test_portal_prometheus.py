"""The alert rules and the dashboard of the portal use series that the portal exports."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge.system.access_tokens import DocumentRefusal

pytest.importorskip("starlette", reason="the extra [portal] is not installed")
from bridge.portal.authentication import AuthenticationFailure
from bridge.portal.metrics import PortalMetrics

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def directory(deploy):
    return deploy / "portal/prometheus"


@pytest.fixture(scope="module")
def rules(package, directory):
    groups = package("yaml").safe_load((directory / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def selected_by(text):
    """Return the series that the PromQL or YAML *text* selects, each with its selected label names."""
    found = re.findall(r"\b((?:scheduled_events_portal|process)_\w+)(?:\{([^}]*)\})?", text)
    return {(name, label) for name, labels in found for label in ["", *re.findall(r"(\w+)\s*[=!]", labels)]}


@pytest.fixture(scope="module")
def exported():
    """Return all series of a portal with their labels, and all label values."""
    metrics = PortalMetrics()
    metrics.answered("records", 503)
    metrics.decisions_refused.labels("unknown_key").inc()
    metrics.ingest_seconds.observe(2)
    metrics.decision_seconds.observe(2)
    metrics.connections_cut.inc()
    metrics.records_refused.labels("rate").inc()
    metrics.notifications.labels("pager", "sent").inc()
    metrics.records.inc()
    metrics.documents.labels("accepted").inc()
    for caller in AuthenticationFailure:
        metrics.callers_refused.labels(caller.value).inc()
    for document in DocumentRefusal:
        metrics.documents.labels(document.value).inc()
    counts = {"undecided": 1, "undecided_soon": 1, "held": 0, "waiting": 0, "approved": 0, "refused": 0}
    metrics.show(1, 1, counts)
    families = text_string_to_metric_families(metrics.page().decode())
    samples = [sample for family in families for sample in family.samples]
    bare = {(sample.name, "") for sample in samples}
    return bare | {(sample.name, name) for sample in samples for name in sample.labels}, {
        value for sample in samples for value in sample.labels.values()
    }


def test_each_dashboard_panel_uses_series_of_the_portal(exported, deploy):
    text = (deploy / "grafana/scheduled-events-portal.json").read_text()
    panels = [each for each in json.loads(text)["panels"] if each["type"] != "row"]
    shown = [selected_by(target["expr"]) for panel in panels for target in panel["targets"]]
    assert all(shown)
    series, values = exported
    wanted = {(name, label) for found in shown for name, label in found}
    assert {(name, label) for name, label in wanted if label not in {"job", "instance"}} - series == set()
    assert set(re.findall(r'decision=\\"(\w+)\\"', text)) <= values


def test_rules_and_their_tests_use_series_of_the_portal(rules, directory, exported):
    series, values = exported
    wanted = selected_by("\n".join(rule["expr"] for rule in rules))
    wanted = {(name, label) for name, label in wanted if label != "job"}
    assert len(wanted) > 10
    assert wanted - series == set()
    kept = "\n".join(path.read_text() for path in sorted((directory / "tests").glob("*.yml")))
    given = {(name, label) for name, label in selected_by(kept) if label not in {"job", "instance"}}
    assert given - series == set()
    named = re.findall(r'(?:reason|result)(?:=|!=|!~|=~)"([^"]+)"', "\n".join(rule["expr"] for rule in rules))
    assert {word for text in named for word in text.split("|")} <= values
