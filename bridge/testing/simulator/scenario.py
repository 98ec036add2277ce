"""Scenarios: what happens in the simulated Azure, and when.

The built-in ones are TOML files of the format that users write (`scenario_file` reads it), shipped beside this module,
so that each is an example for one's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

from bridge.errors import ScenarioError
from bridge.testing.simulator.scenario_file import Step, parse_steps
from bridge.testing.simulator.world import World
from bridge.text import nearest

_SUFFIX = ".toml"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A named list of steps, in the order of their times."""

    name: str
    description: str = ""
    demo_speed: float = 1.0
    """The speed at which all of it passes in a few seconds."""
    steps: tuple[Step, ...] = ()

    def play(self, world: World) -> None:
        """Put every step on the time line of *world*, counted from its present moment."""
        start = world.seconds()
        ids: dict[str, str] = {}
        for step in self.steps:
            world.schedule(start + step.at_seconds, partial(step.apply, world, ids))


def scenario_names() -> tuple[str, ...]:
    """Return the names of the built-in scenarios."""
    files = resources.files("bridge.testing.simulator") / "scenarios"
    return tuple(sorted(file.name[: -len(_SUFFIX)] for file in files.iterdir() if file.name.endswith(_SUFFIX)))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Return a built-in scenario by name, or the one in a file.

    Raises ScenarioError with every mistake of the file at once, one a line.
    """
    text = str(name_or_path)
    names = scenario_names()
    if text in names:
        file = resources.files("bridge.testing.simulator") / "scenarios" / (text + _SUFFIX)
        return parse_scenario(file.read_text(encoding="utf-8"), name=text)
    path = Path(name_or_path)
    if not path.is_file():
        raise ScenarioError(f"No scenario or file is called {text!r}.{nearest(text, names)} Known: {', '.join(names)}.")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ScenarioError(f"Scenario file {text!r} cannot be read: {exc}. It must be a UTF-8 text file.") from exc
    return parse_scenario(content, name=path.stem)


def parse_scenario(text: str, *, name: str) -> Scenario:
    """Return the scenario that *text* (TOML) holds; raises ScenarioError with every mistake."""
    description, demo_speed, steps = parse_steps(text, name=name)
    return Scenario(name=name, description=description, demo_speed=demo_speed, steps=steps)
