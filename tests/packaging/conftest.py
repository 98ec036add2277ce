"""Installs the wheel in $WHEEL with only its runtime dependencies.

The venv has no pytest, so the tests run the same installation as a user. All code runs as a process of the venv in an
empty directory, so that it cannot import the checkout by accident.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Installed:
    """A venv with the wheel."""

    scripts: Path

    @property
    def python(self) -> Path:
        """Return the venv's interpreter."""
        return self.scripts / ("python.exe" if os.name == "nt" else "python")

    @property
    def command(self) -> Path:
        """Return the command that the wheel installs."""
        return self.scripts / ("scheduled-events-bridge" + (".exe" if os.name == "nt" else ""))

    def evaluate(self, code: str, *, cwd: Path) -> str:
        """Return the output of *code* in the venv's Python, in isolated mode and in *cwd*."""
        return self._output([self.python, "-I", "-c", code], cwd=cwd)

    def _output(self, argv: list[str | Path], *, cwd: Path) -> str:
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Return the path of the wheel under test. A missing wheel is a failure, because the user selected these tests."""
    name = os.environ.get("WHEEL")
    if not name:
        pytest.fail("WHEEL is not set. Build one (python -m build), and set WHEEL to its path.")
    path = Path(name).resolve()
    if not path.is_file():
        pytest.fail(
            f"WHEEL is '{name}', but this file does not exist. Build one (python -m build), and set WHEEL to its path."
        )
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return a fresh venv with the wheel."""
    directory = tmp_path_factory.mktemp("installed")
    venv.create(directory, with_pip=True, symlinks=os.name != "nt")
    result = Installed(scripts=directory / ("Scripts" if os.name == "nt" else "bin"))
    done = subprocess.run(
        [result.python, "-m", "pip", "install", "--quiet", wheel],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"pip cannot install {wheel.name} on Python {sys.version.split()[0]}:\n{done.stderr}")
    return result
