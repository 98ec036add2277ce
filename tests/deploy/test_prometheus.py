"""The alert rules of the agent and the portal, with the metrics during typical faults and on a day of normal work.

The directories tests/ contain one promtool test per alert, also for readers without Python. Each agent test has the
metrics that a real agent exported during the fault. test_grafana.py checks that an agent still exports these series.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"


@pytest.fixture(params=[PROMETHEUS, DEPLOY / "portal/prometheus"], ids=["agent", "portal"])
def directory(request):
    """The directory of the alert rules."""
    return request.param


def test_alert_rules_pass_their_promtool_tests(promtool, directory):
    kept = sorted((directory / "tests").glob("*.yml"))
    assert kept
    status, said = promtool("test", "rules", *kept)
    assert status == 0, said


def test_each_alert_has_a_promtool_test(package, directory):
    groups = package("yaml").safe_load((directory / "rules.yml").read_text())["groups"]
    kept = "".join(path.read_text() for path in (directory / "tests").glob("*.yml"))
    fired = set(re.findall(r"labels: 'ALERTS\{alertname=\"(\w+)\"", kept))
    assert fired == {rule["alert"] for group in groups for rule in group["rules"]}


# Alerts about a fleet.


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
def test_more_than_five_percent_of_agents_down_pages_the_on_call(promtool, tmp_path, down, firing):
    series = [
        (f'up{{job="scheduled-events-bridge", instance="vm-{number}"}}', f"{0 if number < down else 1}+0x40")
        for number in range(100)
    ]
    status, said = promtool("test", "rules", fleet(tmp_path, series, minute=30, firing=firing))
    assert status == 0, said


@pytest.mark.parametrize(("slope", "firing"), [(1, []), (0, ["ScheduledEventsBridgeSinkDown"])])
def test_sink_failure_pages_only_if_no_agent_delivers_to_the_sink(promtool, tmp_path, slope, firing):
    def of(name, number, values):
        labels = f'job="scheduled-events-bridge", instance="vm-{number}", sink="sre"'
        return f"scheduled_events_bridge_sink_{name}{{{labels}}}", values

    series = [('up{job="scheduled-events-bridge", instance="vm-9"}', "1+0x90")]
    for number in range(3):
        series += [of("oldest_pending_age_seconds", number, "0+60x90"), of("configured", number, "1+0x90")]
    series += [of("delivered_total", 9, f"5+{slope}x90")]
    status, said = promtool("test", "rules", fleet(tmp_path, series, minute=60, firing=firing))
    assert status == 0, said


# Syntax.


def test_promtool_accepts_rules_and_configurations(promtool, directory):
    status, said = promtool("check", "rules", "--lint-fatal", directory / "rules.yml")
    assert status == 0, said
    for path in directory.glob("prometheus*.yml"):
        status, said = promtool("check", "config", "--lint-fatal", path)
        assert status == 0, said
        assert "WARNING" not in said
