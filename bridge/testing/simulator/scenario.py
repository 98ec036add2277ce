"""Loads scenarios. A scenario describes simulated events and faults over time.

The built-in scenarios are TOML files next to this module. They have the same format as your own scenarios (see
`scenario_file`), so you can use them as examples.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from bridge.errors import ScenarioError
from bridge.testing.simulator.scenario_file import Scenario, parse_scenario
from bridge.text import nearest

_SUFFIX = ".toml"


def scenario_names() -> tuple[str, ...]:
    """Return the names of the built-in scenarios."""
    files = resources.files("bridge.testing.simulator") / "scenarios"
    return tuple(sorted(file.name[: -len(_SUFFIX)] for file in files.iterdir() if file.name.endswith(_SUFFIX)))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Return the built-in scenario or the scenario file *name_or_path*.

    Raises ScenarioError with one line for each error in the file.
    """
    text = str(name_or_path)
    names = scenario_names()
    if text in names:
        file = resources.files("bridge.testing.simulator") / "scenarios" / (text + _SUFFIX)
        return parse_scenario(file.read_text(encoding="utf-8"), name=text)
    path = Path(name_or_path)
    if not path.is_file():
        raise ScenarioError(f"No scenario or file is named {text!r}.{nearest(text, names)} Known: {', '.join(names)}.")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ScenarioError(f"Scenario file {text!r} cannot be read: {exc}. It must be a UTF-8 text file.") from exc
    return parse_scenario(content, name=path.stem)
