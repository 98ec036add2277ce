"""Runs the agent as `run` does, but polls faster than a configuration may ask for.

    python tests/kits/soak/agent.py CONFIG POLL_INTERVAL_SECONDS

Azure answers five requests a second, so the configuration refuses an interval under 0.2 s, and a soak at 20 documents a
second cannot be configured. Everything else is `run` itself: this calls the very function under the command, with the
settings of the file and the one value replaced, so that signals, chores and the order of the stop are those of `run`.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from bridge.cli import commands
from bridge.config.loader import load


def main(path: Path, poll_interval_seconds: float) -> None:
    """Run the agent until SIGTERM."""
    settings = load(path)
    settings = replace(settings, imds=replace(settings.imds, poll_interval_seconds=poll_interval_seconds))
    command: Any = commands.run
    with click.Context(command, info_name="run") as context:
        context.params["path"] = path
        inspect.unwrap(command.callback)(
            settings=settings, log_format="json", log_level="info", allow_second_agent=False
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
