"""`check-config`: what a configuration comes to, and everything that is wrong with it on this machine, at once.

A configuration that `run` refuses never comes so far (exit 78). What is found here `run` puts up with, and tries again,
so it is a failure of the check (1) and no error of the configuration.
"""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli.check_files import local_problems, who
from bridge.cli.check_warnings import Reader, agent_reader, unreadable_files, warnings
from bridge.cli.decide import describe_approval
from bridge.config.loader import Settings, SinkSettings
from bridge.health.probe import is_held
from bridge.text import one_line

_EVERYTHING = "every transition, type and source"


def check_settings(settings: Settings, directory: Path, *, connect: bool, config: Path | None = None) -> bool:
    """Print what *settings*, of the file *config*, come to and what is wrong; return whether nothing is.

    Tries destinations on *connect*.
    """
    problems = local_problems(settings, directory)
    reader = agent_reader(directory)
    is_running = is_held(directory) is True
    click.echo(_headline(len(problems)))
    runs = "; an agent runs on it" if is_running else ""
    click.echo(f"State: {directory.absolute()}{runs}. IMDS: {settings.imds.endpoint}. {_looked(reader)}")
    for line in (*map(_described, settings.sinks), *describe_approval(settings.approval)):
        click.echo(line)
    unreadable = [] if reader is None else unreadable_files(settings, reader, config)
    for warning in (*warnings(settings), *unreadable):
        click.echo(f"Warning: {one_line(warning)}")
    for problem in problems:
        click.echo(f"Wrong: {problem.where}: {one_line(problem.said)}")
    broken = {problem.sink for problem in problems if problem.sink is not None}
    is_reached = not connect or _try(settings, is_running=is_running, broken=broken)
    return not problems and is_reached


def _headline(count: int) -> str:
    if not count:
        return "The configuration is right."
    what = "one thing is" if count == 1 else f"{count} things are"
    return f"The configuration can be used, but {what} wrong here."


def _looked(reader: Reader | None) -> str:
    """Return as whom it was looked: root sees files that the agent's own user may not."""
    if reader is None:
        return f"Looked at as {who()}."
    return f"Looked at as {who()}, and at the modes of files for {reader.name}, the owner of the state directory."


def _described(sink: SinkSettings) -> str:
    config = sink.config
    filters = [
        f"{name} {', '.join(chosen)}"
        for name, chosen in (
            ("transitions", config.transitions),
            ("event types", config.event_types),
            ("event sources", config.event_sources),
        )
        if chosen is not None
    ]
    return f"Sink {sink.name} ({sink.type_name}): scope {config.scope}; {'; '.join(filters) or _EVERYTHING}."


def _try(settings: Settings, *, is_running: bool, broken: set[str]) -> bool:
    from bridge.cli.check_destinations import try_destinations  # noqa: PLC0415  # only who asks pays for it

    is_reached = True
    for tried in try_destinations(settings, is_running=is_running, broken=broken):
        said = one_line(tried.said)
        click.echo(f"{tried.name}: {'FAILED: ' if tried.is_wrong else ''}{said}")
        is_reached = is_reached and not tried.is_wrong
    return is_reached
