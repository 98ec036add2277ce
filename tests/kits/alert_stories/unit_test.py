"""A story as one unit test of promtool: what an agent exported, and which alerts fire at the end of each scene."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from alert_stories.timeline import JOB, Phase, Timeline, labelled


@dataclass(frozen=True)
class Firing:
    """One alert that fires: of each agent when it is *each*, else of all of them together."""

    alert: str
    severity: str = "ticket"
    labels: tuple[tuple[str, str], ...] = ()
    is_each: bool = False

    def shown(self, instances: Sequence[str]) -> list[str]:
        """Return its samples as promtool writes them."""
        known = {"alertname": self.alert, "alertstate": "firing", "job": JOB, "severity": self.severity}
        every = [{"instance": name} for name in instances] if self.is_each else [{}]
        return [labelled("ALERTS", {**known, **dict(self.labels), **one}) for one in every]


@dataclass(frozen=True)
class Scene:
    """A phase of one agent, and what fires at its end, and nothing else.

    *alone* is for one agent; *many* fires besides when three agents have the same story.
    """

    phase: Phase
    alone: tuple[Firing, ...] = ()
    many: tuple[Firing, ...] = ()


def promtool_test(title: str, scenes: Sequence[Scene], *, agents: int, names: Collection[str], severities: str) -> str:
    """Return one entry of promtool's `tests:` in YAML, with *agents* that have the same story.

    Alerts of other *severities* (a regular expression) are not looked at. Over all its minutes nothing else may fire
    than what some scene ends with.
    """
    instances = [f"vm-{number}" for number in range(agents)]
    phases = [scene.phase for scene in scenes]
    timelines = [Timeline(instance, phases) for instance in instances]
    selector = f'ALERTS{{alertstate="firing", severity=~"{severities}"}}'
    lines = [f"- name: {title}", "  interval: 1m", "  input_series:"]
    lines += [f"  {line}" for timeline in timelines for line in timeline.lines(names)]
    lines += ["  promql_expr_test:"]
    minute, ever = 0, set()
    for scene in scenes:
        minute += scene.phase.minutes
        firing = [*scene.alone, *(scene.many if agents > 1 else ())]
        ever |= {each.alert for each in firing}
        shown = sorted(text for each in firing for text in each.shown(instances))
        lines += _expected(selector, minute - 1, [(text, 1) for text in shown])
    names_ever = [(labelled("", {"alertname": alert}), 1) for alert in sorted(ever)]
    lines += _expected(f"max by (alertname) (max_over_time({selector}[{minute}m]))", minute - 1, names_ever)
    return "\n".join(lines) + "\n"


def _expected(expression: str, minute: int, samples: Sequence[tuple[str, int]]) -> list[str]:
    found = [f"    - {{labels: '{labels}', value: {value}}}" for labels, value in samples]
    return [
        f"  - expr: '{expression}'",
        f"    eval_time: {minute}m",
        *(["    exp_samples:", *found] if found else ["    exp_samples: []"]),
    ]
