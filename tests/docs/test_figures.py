"""Compares the figures in the documentation and in the systemd unit with the defaults in the code.

No other test fails if a default changes and the documentation keeps the old figure.
"""

import json
import re

import doc_pages
import msgspec
import pytest
from plots import FIGURES, plot

from bridge.config.loader import read
from bridge.health import readiness
from bridge.system import threads
from sinks.eventhubs.sink import EventHubsConfig

BOOK = doc_pages.book()
DEPLOY = doc_pages.page("deploy/README.md") + doc_pages.book("operate")
UNIT = doc_pages.page("deploy/systemd/scheduled-events-bridge.service")
DEFAULTS = read({})


def _default(struct, name):
    return next(field.default for field in msgspec.structs.fields(struct) if field.name == name)


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
            UNIT, r"first poll, which can take (\d+) s", DEFAULTS.imds.first_timeout_seconds, id="the unit's "
        ),
        pytest.param(DEPLOY, r"`state.max_bytes` \((\d+) MiB", DEFAULTS.state.max_bytes / 2**20, id="max_bytes"),
        pytest.param(
            DEPLOY,
            r"take\s+up\s+to\s+(\d+)\s+MiB\s+more\s+\(`state.max_pending_bytes`",
            DEFAULTS.state.max_pending_bytes / 2**20,
            id="max_pending_bytes",
        ),
        pytest.param(BOOK, r"oldest record has been waiting for (\d+) s", readiness.STUCK_SECONDS, id="readyz, a sink"),
        pytest.param(BOOK, r"after (\d+) s of slack", threads.SLACK_SECONDS, id="healthz"),
    ],
)
def test_documented_figure_matches_the_code(page, quoted, value):
    found = re.findall(quoted, page)
    assert found
    assert {float(figure) for figure in found} == {value}


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.json")), ids=lambda path: path.stem)
def test_chart_is_on_the_page_with_the_date_and_machine_of_each_row(path):
    shown = plot(path).svg("light")
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        assert {row["date"], row["machine"]} <= set(re.findall(r"\d{4}-\d\d-\d\d|(?<=: )\d+ cores[^<]*", shown))
    assert f"plot-{path.stem}-light.svg" in doc_pages.page("docs/operate/figures.md")


def test_systemd_stop_timeout_exceeds_the_agents_grace_period():
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert DEFAULTS.stop_grace_seconds + 1 < float(seconds) < 90  # systemd's own default


def test_watchdog_timeout_exceeds_the_slack_of_healthz():
    """/healthz reports a late poll before systemd kills the agent."""
    [seconds] = re.findall(r"^WatchdogSec=(\d+)$", UNIT, re.MULTILINE)
    assert float(seconds) > threads.SLACK_SECONDS + DEFAULTS.imds.timeout_seconds + DEFAULTS.imds.poll_interval_seconds
