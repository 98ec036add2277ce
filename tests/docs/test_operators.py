"""docs/operate, the pages of whoever runs a fleet: a section for each alert, true figures, and nothing left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import doc_pages
import msgspec
import pytest
from answering import answering
from outbox_kit import OutboxKit

from bridge.config.loader import read
from bridge.exit_codes import ExitCode
from bridge.metrics.metrics import PREFIX, Metrics, OutboxReading
from bridge.outbox.deliveries import OutboxTotals
from bridge.outbox.rows import SinkRow
from bridge.portal import settings as portal_settings
from bridge.testing.records import VM, sample_event, sample_record
from sinks.cloudevent import cloud_event_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = doc_pages.ROOT
DEPLOY = ROOT / "deploy"
PAGE = doc_pages.book("operate")
RUNBOOK = doc_pages.section(PAGE, "Runbook")
RULES = "".join(
    (DEPLOY / path / "rules.yml").read_text(encoding="utf-8") for path in ("prometheus", "portal/prometheus")
)
#: YAML is read by no library of ours: what is wanted stands on lines of one form.
ALERTS = re.findall(r"^ +- alert: (\w+)$", RULES, re.MULTILINE)


def reading(*sinks):
    """Return an outbox with these sinks, as a scrape reads it."""
    rows = {name: SinkRow(name=name) for name in sinks}
    totals = OutboxTotals(sinks=rows, oldest_pending_at={}, needed_bytes=0, stream_id=None)
    return OutboxReading(totals=totals, now=0.0)


def _metric_names():
    metrics = Metrics()
    metrics.approval_channel()
    metrics.watch_outbox(lambda: reading("a"))
    families = list(metrics.registry.collect())
    return {family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "") for family in families}


def test_every_alert_has_a_section_of_the_runbook_and_no_other():
    assert ALERTS
    assert doc_pages.headings(RUNBOOK, 3) == ALERTS


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_leads_to_its_section(alert):
    body = RULES.partition(f"- alert: {alert}\n")[2].partition("- alert:")[0]
    assert re.findall(r"^ +runbook_url: (.+)$", body, re.MULTILINE) == [f"docs/operate/runbook.md#{alert.lower()}"]


@pytest.mark.parametrize("alert", ALERTS)
def test_every_section_says_what_it_means_how_to_look_what_to_do_and_when_it_is_harmless(alert):
    text = doc_pages.section(RUNBOOK, alert, 3)
    meaning, *steps = re.split(r"^- \*\*", text, flags=re.MULTILINE)
    assert len(meaning.strip()) > 40
    assert [step.partition("**")[0] for step in steps] == ["Look", "Do", "Harmless"]


def test_every_alert_that_a_page_names_exists():
    for name in doc_pages.pages():
        named = set(
            re.findall(r"\b(?:ScheduledEvents(?:Bridge|Portal)[A-Z]|AzureScheduledEvent[A-Z])\w+", doc_pages.page(name))
        )
        assert named <= set(ALERTS), name


def test_line_for_a_container_without_curl_shows_the_reasons_of_an_agent_that_is_not_ready():
    [line] = re.findall(r"-- python3 -c '(.+)'$", RUNBOOK, re.MULTILINE)
    with answering(lambda path: (503 if path == "/readyz" else 404, b'{"status":"not_ready"}')) as port:
        program = line.replace("127.0.0.1:9464", f"127.0.0.1:{port}")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (program != line, done.stdout) == (True, '{"status":"not_ready"}\n'), done.stderr


def test_every_option_of_the_installer_that_the_page_names_exists():
    installer = (DEPLOY / "systemd" / "install.sh").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<=[ `])--[a-z-]+", doc_pages.section(PAGE, "Install")))
    named -= {"--quiet", "--require-hashes", "--no-deps", "--wheel-dir"}  # of pip
    named -= {"--wheel", "--out", "--package"}  # of build.py
    named -= {"--version", "--configure", "--strip-components"}  # of the command, dpkg and tar
    assert named
    for option in named:
        assert re.search(rf"^ +[^#\n]*{option}\b[^#\n]*\)", installer, re.MULTILINE), option


def test_every_metric_of_the_page_exists():
    named = {
        span.partition(" ")[0]
        for span in doc_pages.spans(PAGE)
        if re.match(r"(sink|polls|poll|records|identity|state_on|outbox|config_last|approvals|active|next)_", span)
    }
    assert named
    assert named <= _metric_names()


def test_every_exit_code_is_dealt_with_and_no_other():
    readme = doc_pages.page("docs/reference/commands.md")
    of_run = {row[0] for row in doc_pages.table(readme, "exit code")} - {"130"}
    here = {row[0] for row in doc_pages.table(PAGE, "exit code")}
    assert here == of_run
    assert {str(code.value) for code in ExitCode} - {"130"} == here


def test_everything_in_the_directory_is_presented():
    [*rows] = doc_pages.table(doc_pages.page("deploy/README.md"), "in this directory")
    presented = {re.search(r"\]\(([\w-]+)", row[0])[1] for row in rows}
    assert presented == {path.name for path in DEPLOY.iterdir() if path.is_dir() and any(path.rglob("*"))}


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.toml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_configuration_is_accepted(path):
    text = path.read_text(encoding="utf-8").replace("{{HOST}}", "fleet.servicebus.windows.net")  # Bicep fills it in
    if path.name == "portal.toml":
        assert portal_settings.load(path).agents.attested
        return
    assert read(tomllib.loads(text)).sinks


@pytest.mark.parametrize(("vms", "kilobytes"), [(1, 1.8), (100, 3.7)])
def test_size_of_a_record_is_what_the_page_computes_with(vms, kilobytes):
    names = tuple(f"payments-vmss_{number}" for number in range(vms))
    vm = msgspec.structs.replace(VM, scale_set="payments-vmss", zone="1", tags={"team": "payments", "env": "prod"})
    size = len(cloud_event_bytes(sample_record(event=sample_event(resources=names), vm=vm)))
    assert size == pytest.approx(1000 * kilobytes, rel=0.1)
    assert f"{kilobytes} KB" in doc_pages.section(PAGE, "Sizing")


def test_size_of_a_record_in_the_outbox_is_what_the_page_computes_with(tmp_path):
    def used_by(sinks, vms):
        kit = OutboxKit(tmp_path / f"{len(sinks)}-{vms}")
        outbox = kit.open(sinks=sinks)
        names = tuple(f"payments-vmss_{number}" for number in range(vms))
        for document in range(50):  # few events at a time: the last document is in the outbox too
            ids = range(document * 10, document * 10 + 10)
            events = [kit.event(f"{number:036d}", resources=names, description="x" * 300) for number in ids]
            kit.commit(outbox, *events, incarnation=document)
        assert outbox.close(5)  # moves the WAL into the file
        return sum(path.stat().st_size for path in kit.directory.glob("outbox-*")) / 500

    one, two = used_by(("a",), 2), used_by(("a", "b"), 2)
    assert 1700 < one < 3000
    assert 100 < two - one < 300
    assert 1700 < used_by(("a",), 20) < 3300
    text = doc_pages.section(PAGE, "Sizing")
    assert "takes 2 to 3 KB" in text
    assert "0.2 KB" in text


def test_number_of_series_is_what_the_page_says():
    def series(sinks):
        metrics = Metrics()
        metrics.polled("ok", duration_seconds=0.1)
        for name in sinks:
            metrics.sink(name)
        metrics.watch_outbox(lambda names=tuple(sinks): reading(*names))
        return sum(len(family.samples) for family in metrics.registry.collect())

    one, two = series("a"), series("ab")
    assert (round(one, -1), two - one) == (100, 46)
    text = doc_pages.section(PAGE, "Sizing")
    assert "about 100 series" in text
    assert "46 more" in text


KQL = DEPLOY / "azure" / "kql"
KQL_PAGE = doc_pages.page("deploy/azure/kql/README.md")
WORKSPACE_PAGE = doc_pages.page("docs/howto/log-analytics.md")


def test_every_query_is_presented_with_what_it_answers():
    presented = {}
    for link, answers in doc_pages.table(KQL_PAGE, "query"):
        name, path = re.fullmatch(r"\[([\w-]+)\]\((\S+)\)", link).groups()
        assert (KQL / path).stem == name
        assert len(answers) > 20, name
        presented[name] = answers
    assert set(presented) == {path.stem for path in (KQL / "queries").glob("*.kql")}


def test_connection_of_data_explorer_is_the_one_that_the_setup_is_made_for():
    setup = (KQL / "data-explorer" / "setup.kql").read_text(encoding="utf-8")
    [command] = re.findall(r"az kusto data-connection event-hub create(.*?)```", KQL_PAGE, re.DOTALL)
    options = dict(re.findall(r"--([\w-]+) (\S+)", command.replace("\\\n", " ")))
    assert f".create-merge table {options['table-name']} (" in setup
    assert f'ingestion json mapping "{options["mapping-rule-name"]}"' in setup
    assert f'"$.{options["event-system-properties"]}"' in setup
    assert (options["data-format"], options["compression"]) == ("JSON", "None")
    assert f"--name {options['consumer-group']}\n" in KQL_PAGE  # made just before
    [span] = re.findall(r'"MaximumBatchingTimeSpan": "00:00:(\d+)"', setup)
    assert ("half a minute" in KQL_PAGE, span) == (True, "30")


def test_table_and_function_of_a_workspace_are_called_as_the_files_call_them():
    table = json.loads((KQL / "log-analytics" / "table.json").read_text(encoding="utf-8"))["properties"]["schema"][
        "name"
    ]
    assert f"/tables/{table}?" in WORKSPACE_PAGE
    assert f"`{table}` as `tableName`" in WORKSPACE_PAGE
    function = (KQL / "log-analytics" / "ScheduledEventRecords.kql").read_text(encoding="utf-8")
    assert re.search(rf"^{table}$", function, re.MULTILINE)
    [alias, parameter] = re.search(r"--fa (\S+) --fp '(\S+)'", WORKSPACE_PAGE).groups()
    name, _, kind = parameter.partition(":")
    assert f"function {alias} with one parameter, {name} of type {kind}" in function
    for path in (KQL / "queries").glob("*.kql"):
        assert f"{alias}(period)" in path.read_text(encoding="utf-8"), path.name


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_transformation_is_printed_as_a_data_collection_rule_takes_it():
    script = doc_pages.marked(WORKSPACE_PAGE, "kql: transformation")
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    file = (KQL / "log-analytics" / "transform.kql").read_text(encoding="utf-8")
    assert printed.startswith("source\n| extend record = ")
    assert file.endswith(printed)


def test_templates_consumer_groups_are_named_as_the_page_names_them():
    template = (DEPLOY / "azure" / "main.bicep").read_text(encoding="utf-8")
    for page in (KQL_PAGE, doc_pages.page("deploy/azure/README.md")):
        assert "`consumerGroups`" in page
    assert re.search(r"^param consumerGroups array", template, re.MULTILINE)
