"""What a story is: something that happens to real agents, and the alerts that follow.

A story's minutes are those that it lasts for Prometheus; the agent lives it in seconds (see `timeline`). Where three
agents have the same story at once, more may fire: that somebody is woken is about fleets.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.deploy.metrics.stage import Stage
    from tests.deploy.metrics.timeline import Phase as PhaseType
    from tests.deploy.metrics.unit_test import Firing as FiringType
    from tests.deploy.metrics.unit_test import Scene as SceneType

# By path: the directories of tests are no packages.
_HERE = Path(__file__).parent
_UNIT_TEST = runpy.run_path(str(_HERE / "unit_test.py"))
Firing: type[FiringType] = _UNIT_TEST["Firing"]
Scene: type[SceneType] = _UNIT_TEST["Scene"]
Phase: type[PhaseType] = runpy.run_path(str(_HERE / "timeline.py"))["Phase"]


@dataclass(frozen=True, kw_only=True)
class Story:
    """One story; *live* makes it happen on a stage."""

    title: str
    live: Callable[[Stage], list[SceneType]]
    agents: tuple[int, ...]
    """How many agents have it, in one test each."""
    place_counts: bool
    """Whether it matters where the test runs (see `timeline.Timeline`)."""
    severities: str
    """A regular expression: only alerts of these are looked at."""


class Stories(dict[str, Story]):
    """The stories of one file, by the names of their functions."""

    def tell(
        self, title: str, *, agents: tuple[int, ...] = (1,), place_counts: bool = False, severities: str = "page|ticket"
    ) -> Callable[[Callable[[Stage], list[SceneType]]], Callable[[Stage], list[SceneType]]]:
        """Return a decorator that keeps a function as a story."""

        def keep(live: Callable[[Stage], list[SceneType]]) -> Callable[[Stage], list[SceneType]]:
            self[live.__name__] = Story(
                title=title, live=live, agents=agents, place_counts=place_counts, severities=severities
            )
            return live

        return keep


def bridge(
    name: str, *, each: bool = False, severity: str = "ticket", labels: tuple[tuple[str, str], ...] = ()
) -> FiringType:
    """Return one of our alerts as it fires: of each agent, or once for all."""
    return Firing(f"ScheduledEventsBridge{name}", severity=severity, labels=labels, is_each=each)
