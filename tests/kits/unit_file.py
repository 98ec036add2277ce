"""Reads the settings of a systemd unit file, and checks units with systemd-analyze."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Return the values of each key of a unit, regardless of the section."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def _analyze(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def findings(program: str, *units: Path) -> tuple[int, str]:
    """Return the exit code and the findings of *program*, systemd-analyze, for *units*."""
    done = _analyze(program, "verify", "--man=no", *units)
    return done.returncode, done.stdout + done.stderr


def exposure(program: str, unit: Path) -> float:
    """Return the exposure level of the sandbox of *unit*."""
    done = _analyze(program, "security", "--offline=yes", "--no-pager", unit)
    said = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert said, done.stderr
    return float(said[1])
