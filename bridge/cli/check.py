"""`check-config`: what a configuration comes to, and everything that is wrong with it on this machine, at once.

A configuration that `run` refuses is refused before this (exit 78). `run` starts with what is wrong here and tries
again, so it fails the check (exit 1) and is no error of the configuration.
"""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli.check_local import advice_for_root, local_problems, warnings, who
from bridge.cli.decide import describe_approval
from bridge.config.loader import Settings, SinkSettings
from bridge.outbox.locks import is_locked
from bridge.text import one_line

_EVERYTHING = "every transition, type and source"


def check_settings(settings: Settings, directory: Path, *, connect: bool) -> bool:
    """Print what *settings* come to and what is wrong, with destinations on *connect*; return whether all is right."""
    problems = local_problems(settings, directory)
    is_running = is_locked(directory) is True
    click.echo(_headline(len(problems)))
    runs = "; an agent runs on it" if is_running else ""
    click.echo(f"State: {directory.absolute()}{runs}. IMDS: {settings.imds.endpoint}. Looked at as {who()}.")
    for line in (*map(_described, settings.sinks), *describe_approval(settings.approval)):
        click.echo(line)
    for warning in (*warnings(settings), *advice_for_root(directory)):
        click.echo(f"Warning: {one_line(warning)}")
    for problem in problems:
        click.echo(f"Wrong: {problem.where}: {one_line(problem.message)}")
    broken = {problem.sink for problem in problems if problem.sink is not None}
    is_reached = not connect or _try(settings, is_running=is_running, broken=broken)
    return not problems and is_reached


def _headline(count: int) -> str:
    if not count:
        return "The configuration is right."
    what = "one thing is" if count == 1 else f"{count} things are"
    return f"The configuration can be used, but {what} wrong here."


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
        click.echo(f"{tried.name}: {'FAILED: ' if tried.is_wrong else ''}{one_line(tried.message)}")
        is_reached = is_reached and not tried.is_wrong
    return is_reached
