"""`status`: what this VM's agent sees and owes, for a person who was paged, and as JSON for a program.

It shows and does not judge: it ends with 0 whatever it shows, because health is what /readyz answers. It ends with 1
when there is no outbox, or it cannot be read. The state directory is enough; a running agent and a sound configuration
add what only they know.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import click

from bridge.cli.status_json import StatusReport, build_report
from bridge.cli.status_screen import screen
from bridge.cli.terminal import in_place, is_terminal, utc, wrapped
from bridge.clock import utc_now
from bridge.config.loader import Settings, StatusSettings, find_config, load, state_directory
from bridge.errors import ConfigurationError, OutboxError
from bridge.events.event import encode
from bridge.health.client import AgentAnswer, query_readyz
from bridge.outbox import locks
from bridge.outbox.reader import OutboxFile


def watch_status(config: Path | None, directory: Path | None, *, seconds: float) -> None:
    """Show the status again every *seconds* until interrupted; an outbox that cannot be read meanwhile is said."""
    if is_terminal():  # what it shows scrolls away, and is there afterwards
        click.echo("\n" * (shutil.get_terminal_size().lines - 1), nl=False)
    while True:
        try:
            lines = screen(_report_of(config, directory))
        except (OutboxError, ConfigurationError) as error:
            lines = [line for text in str(error).split("\n") for line in wrapped(text, first="", indent="  ")]
        lines += ["", f"{utc(utc_now())}, again every {seconds:g} s; Ctrl-C ends it."]
        click.echo(in_place(lines) if is_terminal() else "\n".join([*lines, ""]), nl=False, color=is_terminal() or None)
        sys.stdout.flush()
        threading.Event().wait(seconds)


def show_status(config: Path | None, directory: Path | None, *, as_json: bool) -> None:
    """Print the status of the outbox in *directory*, by default the one of the configuration.

    Raises ConfigurationError when that is wrong and no directory is given, OutboxError when nothing can be read.
    """
    report = _report_of(config, directory)
    if as_json:
        click.echo(encode(report))
        return
    for line in screen(report):
        click.echo(line)


def _report_of(config: Path | None, directory: Path | None) -> StatusReport:
    settings, problem = _settings(config, directory)
    where = directory if settings is None or directory is not None else state_directory(settings, os.environ)
    if where is None:  # without settings there is a directory
        raise ConfigurationError("Name the state directory with --state-directory.")
    return _report(where, settings, problem)


def _settings(config: Path | None, directory: Path | None) -> tuple[Settings | None, str | None]:
    """Return the settings that belong to *directory*, or None and why there are none."""
    try:
        settings = load(find_config(config, os.environ), os.environ)
        own = state_directory(settings, os.environ)
    except ConfigurationError as error:
        if directory is None:
            hint = "`status --state-directory DIRECTORY` shows an agent's state without the configuration."
            raise ConfigurationError(*error.mistakes, hint, file=error.file) from error
        return None, "The configuration is wrong, see `check-config`; so nobody knows which sinks are configured."
    if config is None and directory is not None and own.absolute() != directory.absolute():
        return (
            None,
            f"No configuration is known for this directory (the usual one is for {own}); name it with --config.",
        )
    return settings, None


def _report(directory: Path, settings: Settings | None, problem: str | None) -> StatusReport:
    is_locked = locks.is_locked(directory)
    answer = query_readyz(StatusSettings() if settings is None else settings.status)
    try:
        with OutboxFile(directory) as outbox:
            snapshot = outbox.snapshot()
            in_memory = outbox.is_agent_in_memory
    except OutboxError as error:
        raise OutboxError(_with_what_is_known(str(error), answer, directory, is_locked=is_locked)) from error
    return build_report(
        snapshot,
        directory=directory,
        is_locked=is_locked,
        in_memory=in_memory,
        # An agent that answers for this outbox without locking its directory has another copy of it.
        answer=answer.of_outbox(None if is_locked is False else snapshot.stored.stream_id, directory),
        settings=settings,
        configuration_problem=problem,
        now=utc_now(),
    )


def _with_what_is_known(message: str, answer: AgentAnswer, directory: Path, *, is_locked: bool | None) -> str:
    """Return *message* with what is known of the agent: it may work from memory, with nothing on the disk."""
    live = answer.readiness
    if live is not None and live.is_about(directory):
        why = "it is still being loaded" if live.state_loading else "the disk refuses"
        where = f"memory, because {why}" if live.state_in_memory else "it all the same"
        return f"{message} An agent runs on it, and works from {where}; it answers at {answer.url}."
    return f"{message} An agent runs on it." if is_locked else message
