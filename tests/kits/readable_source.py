"""A copy of the program that every user may read, for tests that run the program as another user.

A checkout below a home directory of mode 0700 is readable only by its owner. A process that changes its user there can
no longer import modules.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import bridge
import sinks


@cache
def readable_source() -> str:
    """Return a directory with copies of `bridge`, `sinks`, and the entry points, for PYTHONPATH. Removed at exit."""
    directory = Path(tempfile.mkdtemp(prefix="readable-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    directory.chmod(0o755)
    for package in (bridge, sinks):
        source = Path(str(package.__file__)).parent
        shutil.copytree(source, directory / source.name)
    for file in distribution("scheduled-events-bridge").files or ():
        if file.name in {"entry_points.txt", "METADATA"}:  # the sink types are entry points
            (directory / file).parent.mkdir(exist_ok=True)
            shutil.copy(str(file.locate()), directory / file)
    return str(directory)
