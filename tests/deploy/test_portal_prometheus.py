"""The alert rules of the portal: their unit tests, and that every series which they look at is one of the portal's."""

import re
import subprocess

import doc_pages
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge.system.access_tokens import DocumentRefusal

pytest.importorskip("starlette", reason="the extra [portal] is not installed")
from bridge.portal.authentication import AuthenticationFailure
from bridge.portal.metrics import PortalMetrics

pytestmark = pytest.mark.deploy

SEVERITIES = {"page", "ticket"}


@pytest.fixture(scope="module")
def directory(deploy):
    return deploy / "portal/prometheus"


@pytest.fixture(scope="module")
def rules(package, directory):
    groups = package("yaml").safe_load((directory / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture
def promtool(tool):
    """Return a function that runs promtool and returns (exit status, what it said)."""

    def run(*arguments):
        command = [tool("promtool"), *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run


def test_promtool_accepts_the_rules_and_the_configuration(promtool, directory):
    status, said = promtool("check", "rules", "--lint-fatal", directory / "rules.yml")
    assert status == 0, said
    status, said = promtool("check", "config", "--lint-fatal", directory / "prometheus.yml")
    assert (status, "WARNING" in said) == (0, False), said


def test_right_alerts_fire_and_no_other(promtool, directory):
    kept = sorted((directory / "tests").glob("*.yml"))
    assert kept
    status, said = promtool("test", "rules", *kept)
    assert status == 0, said


def test_each_alert_fires_in_a_test(rules, directory):
    kept = "".join(path.read_text() for path in (directory / "tests").glob("*.yml"))
    assert set(re.findall(r"ALERTS\{alertname=\"(\w+)\"", kept)) == {rule["alert"] for rule in rules}


def selected_by(text):
    """Return the series that the PromQL or YAML *text* looks at, each with the names of the labels that it asks for."""
    found = re.findall(r"\b((?:scheduled_events_portal|process)_\w+)(?:\{([^}]*)\})?", text)
    return {(name, label) for name, labels in found for label in ["", *re.findall(r"(\w+)\s*[=!]", labels)]}


@pytest.fixture(scope="module")
def exported():
    """Return the series of a portal to which everything has happened, with each label, and with each of its values."""
    metrics = PortalMetrics()
    metrics.answered("records", 503)
    metrics.decisions_refused.labels("unknown_key").inc()
    metrics.ingest_seconds.observe(2)
    metrics.records.inc()
    metrics.documents.labels("accepted").inc()
    for caller in AuthenticationFailure:
        metrics.callers_refused.labels(caller.value).inc()
    for document in DocumentRefusal:
        metrics.documents.labels(document.value).inc()
    metrics.show({"vms": 1, "open_events": 1})
    families = text_string_to_metric_families(metrics.page().decode())
    samples = [sample for family in families for sample in family.samples]
    bare = {(sample.name, "") for sample in samples}
    return bare | {(sample.name, name) for sample in samples for name in sample.labels}, {
        value for sample in samples for value in sample.labels.values()
    }


def test_rules_and_their_tests_look_at_what_a_portal_exports(rules, directory, exported):
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


def test_each_alert_says_what_is_wrong_what_to_do_and_where_to_read_on(rules, deploy):
    runbook = (deploy.parent / "docs/operate/runbook.md").read_text()
    for rule in rules:
        assert rule["alert"].startswith("ScheduledEventsPortal")
        assert rule["labels"]["severity"] in SEVERITIES
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/operate/runbook.md#{rule['alert'].lower()}"
        assert f"\n## {rule['alert']}\n" in runbook
    headings = re.findall(r"^## (ScheduledEventsPortal\w+)$", runbook, flags=re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules]


def test_every_metric_that_the_page_names_exists(exported):
    rows = doc_pages.table(doc_pages.page("docs/operate/portal.md"), "metric `scheduled_events_portal_...`")
    named = {name for row in rows for name in doc_pages.spans(row[0])}
    series = {name.removeprefix("scheduled_events_portal_").removesuffix("_count") for name, _ in exported[0]}
    assert named - series == set()
    assert len(named) >= 8


def test_job_of_the_configuration_is_the_one_that_the_rules_go_by(rules, package, directory):
    (job,) = package("yaml").safe_load((directory / "prometheus.yml").read_text())["scrape_configs"]
    named = set(re.findall(r'job="([^"]+)"', "\n".join(rule["expr"] for rule in rules)))
    assert named == {job["job_name"]}
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9465"]}]


def test_line_in_the_header_makes_links_of_a_repository(directory, package, tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text((directory / "rules.yml").read_text())
    (command,) = re.findall(r"^#   (sed -i .*)$", path.read_text(), flags=re.MULTILINE)
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, timeout=30)
    groups = package("yaml").safe_load(path.read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["annotations"]["runbook_url"].startswith("https://git.example.net/bridge/blob/main/docs/operate/")
