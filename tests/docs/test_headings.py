"""What a newcomer must find on the two long pages, and the figures there that are the code's own.

A section that somebody drops or renames takes a promise with it, and a default that changes leaves an old figure
behind; neither breaks a link or a table, so no other test would see it.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import msgspec
import pytest

from bridge.config.loader import read
from bridge.health import reporter
from bridge.outbox import storage
from bridge.system import threads
from sinks.eventhubs.sink import EventHubsConfig

PAGES = runpy.run_path(str(Path(__file__).with_name("pages.py")))
README = PAGES["page"]("README.md")
DEPLOY = PAGES["page"]("deploy/README.md")
UNIT = PAGES["page"]("deploy/systemd/scheduled-events-bridge.service")
DEFAULTS = read({})

#: Second-level heading of the README, and words that its text must have.
OF_README = {
    "A record woke you: what does it mean?": ("at least once", "`id`", "`sequence`"),
    "From the document to a sink, and back": ("```text", "IMDS", "outbox", "approver", "ops portal"),
    "Try it: ten minutes to a webhook": ("simulate", "curl"),
    "What is here": ("`eventhubs`", "`webhook`", "sinks/README.md"),
    "Configurations": ("**Fleet logging**", "**Alerts**", "**A drain script**", "check-config"),
    "Approvals": ("not approving never stops an event", "`dry_run = true`", "`approvals.disabled`", "up to 15 minutes"),
    "Health and metrics": ("/healthz", "/readyz", "/metrics"),
    "What Azure promises, and what it does not": (
        "15 minutes",
        "30 seconds",
        "without notice",
        "24 hours",
        "NotBefore",
    ),
    "Commands": ("exit code",),
    "Settings": ("`imds.poll_interval_seconds`", "Unknown keys"),
    "Where state lives, and what goes wrong": ("`outbox.db`", "the disk is full"),
    "Figures": ("SIGKILL", "p99"),
    "Compared with others, and when not to use it": (
        "Event Grid",
        "Pacemaker",
        "Do not use it where a reboot must never",
    ),
}
#: The same of deploy/README.md.
OF_DEPLOY = {
    "Before the first VM": ("Your own reboots wait", "up to 15 minutes", "five requests a second", "`dry_run = true`"),
    "Install": ("install.sh", "starts the agent"),
    "Rollout": ("check-config --connect", "send-test", "/readyz", "in rings"),
    "Upgrade and downgrade": ("schema version", "`outbox list` is empty"),
    "Exit codes and the service manager": ("78",),
    "Sizing": ("**Memory and CPU**", "**Disk**", "**Records**", "**Connections**", "**Prometheus**", "**Duplicates.**"),
    "The state directory": ("**Golden images**", "temporary disk", "ephemeral OS disk", "No backup"),
    "Secrets": ("rotate",),
    "Network": ("169.254.169.254", "Proxies"),
    "Approvals in an emergency": ("approvals.disabled",),
    "Logs": ("ERROR",),
    "Runbook": ("Look", "Do", "Harmless"),
}


def _section(page, heading):
    """Return what stands under *heading*; a comment in a block of code would pass for a heading of the first level."""
    return PAGES["section"](re.sub(r"(?<=\n)# .*\n", "", page), heading)


def _default(struct, name):
    return next(field.default for field in msgspec.structs.fields(struct) if field.name == name)


@pytest.mark.parametrize(("heading", "words"), OF_README.items(), ids=list(OF_README))
def test_readme_has_the_section_with_the_words_that_matter(heading, words):
    text = _section(README, heading)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("heading", "words"), OF_DEPLOY.items(), ids=list(OF_DEPLOY))
def test_page_of_whoever_runs_a_fleet_has_the_section_with_the_words_that_matter(heading, words):
    text = _section(DEPLOY, heading)
    assert [word for word in words if word not in text] == []


def test_no_section_of_either_page_is_left_out_here():
    assert PAGES["headings"](README, 2) == list(OF_README)
    assert PAGES["headings"](DEPLOY, 2) == list(OF_DEPLOY)


def test_first_screens_say_what_turning_it_on_does_to_ones_own_reboots():
    [paragraph] = re.findall(r"^\*\*Before you turn it on:\*\*.*?\n\n", README, re.MULTILINE | re.DOTALL)
    for words in ("waits up to 15 minutes", "The agent approves nothing unless", "#your-own-reboots", "24 hours"):
        assert words in " ".join(paragraph.split()), words
    assert README.index(paragraph) < README.index("\n## ")
    assert PAGES["headings"](DEPLOY, 2)[0] == "Before the first VM"


def test_comparison_with_event_grid_says_how_notice_approval_and_durability_differ():
    table = PAGES["table"](PAGES["section"](README, "Compared with others, and when not to use it"), "instead of this")
    [row] = [" ".join(row) for row in table if "Event Grid" in row[0]]
    for words in ("acknowledge", "NotBefore", "approval by", "24 hours", "preview", "Microsoft's pages"):
        assert words in row, words


@pytest.mark.parametrize(
    ("page", "quoted", "value"),
    [
        pytest.param(DEPLOY, r"`stop_grace_seconds`\s+\((\d+)\)", DEFAULTS.stop_grace_seconds, id="stop_grace_seconds"),
        pytest.param(UNIT, r"# stop_grace_seconds \((\d+)\)", DEFAULTS.stop_grace_seconds, id="the unit's"),
        pytest.param(
            DEPLOY, r"`idle_close_seconds` \((\d+)\)", _default(EventHubsConfig, "idle_close_seconds"), id="idle_close"
        ),
        pytest.param(DEPLOY, r"first poll may take (\d+) s", DEFAULTS.imds.first_timeout_seconds, id="first poll"),
        pytest.param(
            UNIT, r"first poll, which may take (\d+) s", DEFAULTS.imds.first_timeout_seconds, id="the unit's "
        ),
        pytest.param(DEPLOY, r"`state.max_bytes` at most, (\d+) MiB", DEFAULTS.state.max_bytes / 2**20, id="max_bytes"),
        pytest.param(DEPLOY, r"it may take\s+(\d+) MiB more while", storage.MEMORY_BYTES / 2**20, id="memory"),
        pytest.param(README, r"memory \(at most (\d+) MiB", storage.MEMORY_BYTES / 2**20, id="memory, README"),
        pytest.param(README, r"oldest record has waited for (\d+) s", reporter.STUCK_SECONDS, id="readyz, a sink"),
        pytest.param(README, r"after (\d+) s of slack", threads.SLACK_SECONDS, id="healthz"),
    ],
)
def test_figure_of_the_page_is_the_one_of_the_code(page, quoted, value):
    found = re.findall(quoted, page)
    assert found
    assert {float(figure) for figure in found} == {value}


def test_delivered_records_go_after_the_days_that_the_pages_say():
    assert "delivered ones go after seven days" in DEPLOY
    assert DEFAULTS.state.keep_delivered_seconds == 7 * 86_400


def test_restart_is_as_soon_as_the_page_says():
    assert "five seconds later, without end" in " ".join(DEPLOY.split())
    assert re.findall(r"^RestartSec=(\d+)$", UNIT, re.MULTILINE) == ["5"]


def test_systemd_waits_longer_than_the_agent_takes_to_stop_and_less_than_a_person_would():
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert DEFAULTS.stop_grace_seconds + 1 < float(seconds) < 90  # systemd's own default


def test_watchdog_leaves_the_agent_the_slack_that_healthz_does():
    """A poll that is late shows in /healthz before systemd ends the agent for it."""
    [seconds] = re.findall(r"^WatchdogSec=(\d+)$", UNIT, re.MULTILINE)
    assert float(seconds) > threads.SLACK_SECONDS + DEFAULTS.imds.timeout_seconds + DEFAULTS.imds.poll_interval_seconds
