"""A library for LD_PRELOAD, built from C for a test of what the disk does to the agent."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def built(tmp_path_factory: pytest.TempPathFactory, source: str) -> Path:
    """Return the library that *source* makes; skip where there is no compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("The library that makes the disk hang needs gcc.")
    directory = tmp_path_factory.mktemp("shim")
    text, library = directory / "hang.c", directory / "hang.so"
    text.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(text), "-ldl"], check=True, timeout=60)
    return library
