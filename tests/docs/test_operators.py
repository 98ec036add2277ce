"""The pages for fleet operators in docs/operate: the runbook, the configurations, the sizing, and the commands."""

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
#: No dependency parses YAML, but the names of the alerts are on lines of one form.
ALERTS = re.findall(r"^ +- alert: (\w+)$", RULES, re.MULTILINE)


def test_runbook_sections_match_the_alerts():
    assert ALERTS
    assert doc_pages.headings(RUNBOOK, 3) == ALERTS


def test_every_alert_named_on_a_page_exists():
    for name in doc_pages.pages():
        named = set(
            re.findall(r"\b(?:ScheduledEvents(?:Bridge|Portal)[A-Z]|AzureScheduledEvent[A-Z])\w+", doc_pages.page(name))
        )
        assert named <= set(ALERTS), name


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.toml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_configuration_in_deploy_is_valid(path):
    text = path.read_text(encoding="utf-8").replace(
        "{{HOST}}", "fleet.servicebus.windows.net"
    )  # Bicep replaces the placeholder.
    if path.name == "portal.toml":
        assert portal_settings.load(path).agents.attested
        return
    assert read(tomllib.loads(text)).sinks


@pytest.mark.parametrize(("vms", "kilobytes"), [(1, 1.8), (100, 3.7)])
def test_documented_record_size_matches_real_records(vms, kilobytes):
    names = tuple(f"payments-vmss_{number}" for number in range(vms))
    vm = msgspec.structs.replace(VM, scale_set="payments-vmss", zone="1", tags={"team": "payments", "env": "prod"})
    size = len(cloud_event_bytes(sample_record(event=sample_event(resources=names), vm=vm)))
    assert size == pytest.approx(1000 * kilobytes, rel=0.1)
    assert f"{kilobytes} KB" in doc_pages.section(PAGE, "Sizing")


KQL = DEPLOY / "azure" / "kql"
WORKSPACE_PAGE = doc_pages.page("docs/howto/log-analytics.md")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_documented_command_prints_the_transformation_as_json():
    script = doc_pages.marked(WORKSPACE_PAGE, "kql: transformation")
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    file = (KQL / "log-analytics" / "transform.kql").read_text(encoding="utf-8")
    assert printed.startswith("source\n| extend record = ")
    assert file.endswith(printed)
