"""Options and decorators that more than one command uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from bridge.errors import ConfigurationError

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)
# readable=False, because the error of a failed read is more precise than click's message.
DIRECTORY = click.Path(file_okay=False, readable=False, path_type=Path)
option = partial(click.option, show_default=True)


def log_options(command: Command) -> Command:
    """Add the logging options."""
    formats, levels = ["auto", "json", "text", "journal"], ["debug", "info", "warning", "error"]
    auto = "auto: text on a terminal, journal under systemd."
    command = option("--log-level", type=click.Choice(levels), default="info")(command)
    return option("--log-format", type=click.Choice(formats), default="auto", help=auto)(command)


config = option(
    "--config",
    "-c",
    "path",
    type=click.Path(path_type=Path),
    help="TOML file.  [default: the usual location]",
    show_default=False,
)
state_directory = option(
    "--state-directory", type=DIRECTORY, help="The state directory.  [default: from the configuration]"
)


def runs(target: str) -> Callable[[Callable[[], None]], Any]:
    """Return a decorator that runs *target*, such as ``events.list_events``, for a command.

    To keep `--help` fast, the module that contains *target* is imported only when the command runs. The decorated
    function only provides the help text.
    """
    module, name = target.rsplit(".", 1)

    def with_target(described: Callable[[], None]) -> Any:
        @wraps(described)
        def run(**values: Any) -> Any:
            return getattr(import_module(f"bridge.cli.{module}"), name)(**values)

        return run

    return with_target


def with_config(command: Command) -> Any:
    """Add `--config`, and pass the settings to *command* as `settings`."""

    @config
    @wraps(command)
    def with_settings(path: Path | None, **rest: Any) -> Any:
        from bridge.config.loader import find_config, load  # noqa: PLC0415

        return command(settings=load(find_config(path, os.environ), os.environ), **rest)

    return with_settings


def with_state(command: Command) -> Any:
    """Add `--config` and `--state-directory`, and pass the directory to *command*."""

    @config
    @state_directory
    @wraps(command)
    def with_directory(path: Path | None, state_directory: Path | None, **rest: Any) -> Any:
        return command(directory=state_directory or _directory_of(path), **rest)

    return with_directory


def _directory_of(path: Path | None) -> Path:
    from bridge.cli.terminal import say  # noqa: PLC0415
    from bridge.config.loader import directory_despite_errors, find_config, load_top  # noqa: PLC0415
    from bridge.config.loader import state_directory as directory_of  # noqa: PLC0415

    try:
        settings = load_top(find_config(path, os.environ), os.environ)
    except ConfigurationError as error:
        directory = directory_despite_errors(path, error)
        say(str(error), f"The command uses the state directory {directory}.")
        return directory
    return directory_of(settings, os.environ)
