"""The options that several commands share, and what they give a command: the settings, or the state directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from bridge.config.loader import find_config, load
from bridge.config.loader import state_directory as directory_of

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)
# readable=False: the message of our own, when it is read, says more.
DIRECTORY = click.Path(file_okay=False, readable=False, path_type=Path)
option = partial(click.option, show_default=True)


def _no_directory(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a directory, which is wrong usage; any other fault of a file is found when it is read."""
    if path is not None and os.path.isdir(path):  # noqa: PTH112  # False, too, where it may not be seen
        raise click.BadParameter(f"{path} is a directory; name the file itself, such as {path / 'config.toml'}.")
    return path


config = option(
    "--config",
    "-c",
    "path",
    type=click.Path(path_type=Path),
    callback=_no_directory,
    help="TOML file.  [default: its usual place]",
    show_default=False,
)
state_directory = option(
    "--state-directory", type=DIRECTORY, help="Where the outbox is.  [default: what the configuration says]"
)


def with_config(command: Command) -> Any:
    """Give *command* the settings of `--config`, as `settings`."""

    @config
    @wraps(command)
    def with_settings(path: Path | None, **rest: Any) -> Any:
        return command(settings=load(find_config(path, os.environ), os.environ), **rest)

    return with_settings


def with_state(command: Command) -> Any:
    """Give *command* the state directory, from its own option or from the configuration."""

    @config
    @state_directory
    @wraps(command)
    def with_directory(path: Path | None, state_directory: Path | None, **rest: Any) -> Any:
        return command(directory=state_directory or _directory_of(path), **rest)

    return with_directory


def _directory_of(path: Path | None) -> Path:
    return directory_of(load(find_config(path, os.environ), os.environ), os.environ)
