"""docs/operate, the pages of whoever runs a fleet: a section for each alert, true figures, and nothing left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import doc_pages
import msgspec
import pytest

from bridge.config.loader import read
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


def test_every_alert_has_a_section_of_the_runbook_and_no_other():
    assert ALERTS
    assert doc_pages.headings(RUNBOOK, 3) == ALERTS


def test_every_alert_that_a_page_names_exists():
    for name in doc_pages.pages():
        named = set(
            re.findall(r"\b(?:ScheduledEvents(?:Bridge|Portal)[A-Z]|AzureScheduledEvent[A-Z])\w+", doc_pages.page(name))
        )
        assert named <= set(ALERTS), name


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


KQL = DEPLOY / "azure" / "kql"
WORKSPACE_PAGE = doc_pages.page("docs/howto/log-analytics.md")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_transformation_is_printed_as_a_data_collection_rule_takes_it():
    script = doc_pages.marked(WORKSPACE_PAGE, "kql: transformation")
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    file = (KQL / "log-analytics" / "transform.kql").read_text(encoding="utf-8")
    assert printed.startswith("source\n| extend record = ")
    assert file.endswith(printed)
