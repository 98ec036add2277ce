"""Reads the settings of a systemd unit file."""

from __future__ import annotations

from pathlib import Path


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Return the values of each key of a unit, regardless of the section."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found
