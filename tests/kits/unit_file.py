"""The settings of a systemd unit file, as they stand."""

from __future__ import annotations

from pathlib import Path


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Return each key of a unit with the list of its values, whatever its section."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found
