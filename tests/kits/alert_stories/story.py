"""What a story is: something that happens to real agents, and the alerts that follow.

A story's minutes are those that it lasts for Prometheus; the agent lives it in seconds (see `timeline`). Where three
agents have the same story at once, more may fire: that somebody is woken is about fleets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from alert_stories.stage import Stage
from alert_stories.unit_test import Firing, Scene


@dataclass(frozen=True, kw_only=True)
class Story:
    """One story; *live* makes it happen on a stage."""

    title: str
    live: Callable[[Stage], list[Scene]]
    agents: tuple[int, ...]
    """How many agents have it, in one test each."""
    severities: str
    """A regular expression: only alerts of these are looked at."""


class Stories(dict[str, Story]):
    """The stories of one file, by the names of their functions."""

    def tell(
        self, title: str, *, agents: tuple[int, ...] = (1,), severities: str = "page|ticket"
    ) -> Callable[[Callable[[Stage], list[Scene]]], Callable[[Stage], list[Scene]]]:
        """Return a decorator that keeps a function as a story."""

        def keep(live: Callable[[Stage], list[Scene]]) -> Callable[[Stage], list[Scene]]:
            self[live.__name__] = Story(title=title, live=live, agents=agents, severities=severities)
            return live

        return keep


def bridge(
    name: str, *, each: bool = False, severity: str = "ticket", labels: tuple[tuple[str, str], ...] = ()
) -> Firing:
    """Return one of our alerts as it fires: of each agent, or once for all."""
    return Firing(f"ScheduledEventsBridge{name}", severity=severity, labels=labels, is_each=each)
