"""Compares the pages "Health and metrics" and "The simulator" with the metrics, labels, and requests of the code."""

import re

import doc_pages
from listed_outbox import ListedOutbox

from bridge.errors import RetryReason
from bridge.events.event import Document
from bridge.events.record import Transition
from bridge.metrics.metrics import PREFIX, Metrics
from bridge.polling.poller import PollResult
from bridge.testing.records import sample_event
from bridge.testing.simulator.control import Control
from bridge.testing.simulator.world import World

ROOT = doc_pages.ROOT
README = doc_pages.book()
HEALTH = doc_pages.section(README, "Health and metrics")
#: Files that can contain names of metrics.
USERS = sorted(
    path
    for directory in ("deploy", "docs", "README.md", "sinks/README.md")
    for path in ((ROOT / directory).rglob("*") if (ROOT / directory).is_dir() else [ROOT / directory])
    if path.suffix in {".md", ".yml", ".yaml", ".json", ".kql"}
)


def _quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def _documented():
    """Return the documented labels by the name of the metric."""
    rows = doc_pages.table(HEALTH, "metric")
    names = [name for cell, *_ in rows for name in _quoted(cell)]
    assert len(names) == len(set(names)), "a metric is documented twice"
    return {_quoted(cell)[0]: set(_quoted(labels)) for cell, labels, _ in rows}


def _exported():
    """Return the exported families after one call of each kind."""
    metrics = Metrics()
    metrics.polled("ok", duration_seconds=0.1)
    metrics.good_poll(1_700_000_000.0, Document(incarnation=1, events=(sample_event(),)))
    metrics.recorded(Transition.SCHEDULED)
    metrics.approval("portal", "accepted")
    metrics.approval_channel().answered(1_700_000_000.0)
    metrics.watch_vm(lambda: "WestNO_0")
    sink = metrics.sink("a")
    sink.sent(0.1)
    sink.delivered(0.1)
    sink.retried("timeout")
    metrics.watch_outbox(ListedOutbox(), tuple)
    return list(metrics.registry.collect())


def _name(family):
    return family.name + ("_total" if family.type == "counter" else "")


def _labels(family):
    return {label for sample in family.samples for label in sample.labels} - {"le"}


def test_documented_metrics_match_the_exported_metrics():
    exported = {_name(family) for family in _exported()}
    own = {name.removeprefix(PREFIX) for name in exported if name.startswith(PREFIX)}
    others = {name.partition("_")[0] + "_*" for name in exported if not name.startswith(PREFIX)}
    assert set(_documented()) == own | others


def test_documented_metric_labels_match_the_exported_labels():
    exported = {_name(family).removeprefix(PREFIX): _labels(family) for family in _exported()}
    assert {name: labels for name, labels in _documented().items() if not name.endswith("*")} == {
        name: labels for name, labels in exported.items() if not name.startswith("process_")
    }


#: The variables of the Ansible role have the same prefix as the metrics.
VARIABLES = {
    name
    for path in (ROOT / "deploy/ansible").rglob("*.yml")
    for name in re.findall(rf"\b{PREFIX}[a-z_]+[a-z]\b", path.read_text(encoding="utf-8"))
}


def test_every_metric_named_in_a_file_exists():
    known = {sample.name for family in _exported() for sample in family.samples}
    known |= {_name(family) for family in _exported()}
    for path in USERS:
        named = set(re.findall(rf"\b{PREFIX}[a-z_]+[a-z]\b", path.read_text(encoding="utf-8")))
        assert named - known - VARIABLES == set(), path


def test_documented_poll_results_match_the_code():
    [row] = [row for row in doc_pages.table(HEALTH, "metric") if "polls_total" in row[0]]
    assert set(_quoted(row[2])) == {result.value for result in PollResult} | {"status_NNN"}


def test_documented_retry_reasons_match_the_code():
    documented = {_quoted(cell)[0] for cell, _ in doc_pages.table(HEALTH, "reason")}
    assert documented == {reason.value for reason in RetryReason} | {"status_NNN", "other"}


def test_documented_simulator_requests_match_the_code():
    control = Control(World(("vm",)), machines=list, requests=(), certificates=dict)
    known = {f"{method} /control/{path}".rstrip("/") for method, path in control._routes}
    rows = doc_pages.table(doc_pages.section(README, "The simulator"), "request")
    documented = {_quoted(request)[0]: _quoted(meaning) for request, meaning in rows}
    assert set(documented) == known | {"POST /control/events/ID/start"}
    assert {"complete", "cancel", "approve", "update"} <= set(documented["POST /control/events/ID/start"])
