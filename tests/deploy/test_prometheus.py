"""The alert rules, with the metrics of a real agent during typical faults and on a day of normal work.

deploy/prometheus/tests/ contains one promtool test per alert, also for readers without Python. The tests of the stories
below were recorded from such a run, and `DEPLOY_METRICS=write` records them again.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from alert_stories import agent, approvals, azure, delivery, state
from alert_stories.stage import Stage
from alert_stories.unit_test import promtool_test

pytestmark = pytest.mark.deploy

STORIES = agent.STORIES | approvals.STORIES | azure.STORIES | delivery.STORIES | state.STORIES
DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
HEADER = """\
# {title}.
# What a real agent exported then, stretched over the minutes of this test; up and the clock are Prometheus' own.
# Made by: DEPLOY_METRICS=write pytest -m deploy tests/deploy/test_prometheus.py
rule_files: [{rules}]
evaluation_interval: 1m
tests:
"""


@pytest.fixture
def promtool(tool):
    """Return a function that runs promtool and returns (exit status, what it said)."""
    program = tool("promtool")

    def run(*arguments):
        command = [program, *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def play(tmp_path, agent_env):
    """Return a function that runs a story with a real agent and returns its scenes."""

    def scenes(story):
        with Stage(tmp_path, agent_env) as stage:
            return story.live(stage)

    return scenes


@pytest.fixture(scope="module")
def rules(package):
    groups = package("yaml").safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def selected_by(rules):
    """Return the names of the series that *rules* look at."""
    return {"up", *re.findall(r"\b(?:scheduled_events_bridge|process)_\w+", " ".join(rule["expr"] for rule in rules))}


def written(story, scenes, rules_path, names):
    tests = [
        promtool_test(
            f"{story.title} ({agents} agent{'s' if agents > 1 else ''})",
            scenes,
            agents=agents,
            names=names,
            severities=story.severities,
        )
        for agents in story.agents
    ]
    return HEADER.format(title=story.title, rules=rules_path) + "".join(tests)


@pytest.mark.parametrize("name", STORIES)
def test_on_what_a_live_agent_exports_the_right_alerts_fire_and_no_other(promtool, rules, play, tmp_path, name):
    story, names = STORIES[name], selected_by(rules)
    scenes = play(story)
    path = tmp_path / "story.yml"
    path.write_text(written(story, scenes, PROMETHEUS / "rules.yml", names))
    status, said = promtool("test", "rules", path)
    assert status == 0, said
    if os.environ.get("DEPLOY_METRICS") == "write":
        (PROMETHEUS / "tests" / f"{name}.yml").write_text(written(story, scenes, "../rules.yml", names))


def test_the_kept_tests_pass(promtool):
    kept = sorted((PROMETHEUS / "tests").glob("*.yml"))
    assert set(STORIES) <= {path.stem for path in kept}
    status, said = promtool("test", "rules", *kept)
    assert status == 0, said


def test_each_alert_fires_in_a_test_and_stays_silent_before(rules):
    fired = set()
    for path in (PROMETHEUS / "tests").glob("*.yml"):
        text = path.read_text()
        fired |= set(re.findall(r"labels: 'ALERTS\{alertname=\"(\w+)\"", text))
    assert fired == {rule["alert"] for rule in rules}


# What no single agent shows.


def fleet(tmp_path, series, *, minute, firing):
    """Return a promtool test in which exactly the alerts *firing* fire; *series* are (name and labels, values)."""
    lines = [f"rule_files: [{PROMETHEUS / 'rules.yml'}]", "evaluation_interval: 1m", "tests:", "- interval: 1m"]
    lines += ["  input_series:", *(f"  - {{series: '{each}', values: '{values}'}}" for each, values in series)]
    lines += ["  promql_expr_test:", f"  - eval_time: {minute}m"]
    lines += ['    expr: \'count by (alertname) (ALERTS{alertstate="firing", severity="page"})\'', "    exp_samples:"]
    lines += [f"    - {{labels: '{{alertname=\"{alert}\"}}', value: 1}}" for alert in firing]
    path = tmp_path / "fleet.yml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(("down", "firing"), [(5, []), (6, ["ScheduledEventsBridgeFleetBlind"])])
def test_somebody_is_woken_when_more_than_one_agent_in_twenty_is_down(promtool, tmp_path, down, firing):
    series = [
        (f'up{{job="scheduled-events-bridge", instance="vm-{number}"}}', f"{0 if number < down else 1}+0x40")
        for number in range(100)
    ]
    status, said = promtool("test", "rules", fleet(tmp_path, series, minute=30, firing=firing))
    assert status == 0, said


@pytest.mark.parametrize(("slope", "firing"), [(1, []), (0, ["ScheduledEventsBridgeSinkDown"])])
def test_nobody_is_woken_for_a_sink_that_takes_records_from_others(promtool, tmp_path, slope, firing):
    def of(name, number, values):
        labels = f'job="scheduled-events-bridge", instance="vm-{number}", sink="sre"'
        return f"scheduled_events_bridge_sink_{name}{{{labels}}}", values

    series = [('up{job="scheduled-events-bridge", instance="vm-9"}', "1+0x90")]
    for number in range(3):
        series += [of("oldest_pending_age_seconds", number, "0+60x90"), of("configured", number, "1+0x90")]
    series += [of("delivered_total", 9, f"5+{slope}x90")]
    status, said = promtool("test", "rules", fleet(tmp_path, series, minute=60, firing=firing))
    assert status == 0, said


# What the on-call reads.


def test_promtool_accepts_rules_and_configurations(promtool):
    status, said = promtool("check", "rules", "--lint-fatal", PROMETHEUS / "rules.yml")
    assert status == 0, said
    for path in PROMETHEUS.glob("prometheus*.yml"):
        status, said = promtool("check", "config", "--lint-fatal", path)
        assert status == 0, said
        assert "WARNING" not in said
