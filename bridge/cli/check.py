"""`check-config`: what a configuration comes to, and everything that is wrong with it on this machine, at once.

A configuration that `run` refuses is refused before this (exit 78). `run` starts with what is wrong here and tries
again, so it fails the check (exit 1) and is no error of the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import click

from bridge.cli.check_local import advice_for_root, local_problems, warnings, who
from bridge.cli.terminal import Colour, counted, styled, with_label, wrapped
from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.config.loader import Settings, SinkSettings, configuration_in_words
from bridge.config.overrides import misspelt
from bridge.outbox.lock import is_locked
from bridge.text import one_line

_NAME = "scheduled-events-bridge"
_WARNING = "Warning:"
_EVERYTHING = "every transition, type and source"


def check_settings(settings: Settings, directory: Path, *, connect: bool) -> bool:
    """Print what *settings* come to and what is wrong, with destinations on *connect*; return whether all is right."""
    problems = local_problems(settings, directory)
    is_running = is_locked(directory) is True
    _show(_headline(len(problems), connect=connect), colour="bright_red" if problems else "green", bold=True)
    runs = "; an agent runs on it" if is_running else ""
    _show(f"State: {directory.absolute()}{runs}. IMDS: {settings.imds.endpoint}. Looked at as {who()}.")
    file = configuration_in_words(settings.file, os.environ)
    _show(f"Configuration: {file}. This is version {version(_NAME)}.")
    for line in (*_overrides(settings), *map(_sink, settings.sinks), *describe_approval(settings.approval)):
        _show(line)
    for warning in (*misspelt(os.environ), *warnings(settings)):
        click.echo("\n".join(with_label(wrapped(f"{_WARNING} {warning}", first="", indent="  "), _WARNING)))
    for advice in advice_for_root(directory):  # with a command, which is whole only on a line of its own
        click.echo(f"{styled(_WARNING, bold=True)} {one_line(advice)}")
    for problem in problems:
        _show(f"Wrong: {problem.where}: {problem.message}", colour="bright_red")
    broken = {problem.sink for problem in problems if problem.sink is not None}
    is_reached = not connect or _try(settings, is_running=is_running, broken=broken)
    return not problems and is_reached


def _show(text: str, *, colour: Colour | None = None, bold: bool = False) -> None:
    """Print *text*, wrapped and coloured on a terminal."""
    for line in wrapped(text, first="", indent="  "):
        click.echo(styled(line, colour=colour, bold=bold))


def _headline(count: int, *, connect: bool) -> str:
    if not count:
        return "The configuration is right." + (" What answers from here is said at the end." if connect else "")
    what = "one thing is" if count == 1 else f"{count} things are"
    return f"The configuration can be used, but {what} wrong here."


def _overrides(settings: Settings) -> Iterator[str]:
    for key, variable in settings.overrides:
        table, _, name = key.partition(".")
        value = getattr(getattr(settings, table), name)
        yield f"From the environment, before the file: {key} is {value!r} (${variable})."


def _sink(sink: SinkSettings) -> str:
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
    filters += ["only as the first VM in Resources"] if config.speak == "first" else []
    return f"Sink {sink.name} ({sink.type_name}): scope {config.scope}; {'; '.join(filters) or _EVERYTHING}."


def describe_approval(approval: ApprovalSettings | None) -> list[str]:
    """Return what the configuration lets happen without a person at the VM, a line each."""
    if approval is None:
        return ["Approvals: none; the agent never tells Azure anything."]
    dry = " dry_run: Azure is never told." if approval.dry_run else ""
    lines = [f"Approvals: {counted(len(approval.rules), 'rule')}, {'a' if approval.remote else 'no'} portal.{dry}"]
    lines.extend(_rule(rule) for rule in approval.rules)
    if approval.remote is not None:
        approvers = ", ".join(sorted({key.approver for key in approval.remote.keys}))
        needed = approval.remote.required_approvals
        after = "" if approval.remote.command is None else f", and {approval.remote.command[0]} must exit 0"
        lines.append(f"Portal {approval.remote.url}: {needed} of {approvers} must approve{after}.")
    return lines


def _rule(rule: RuleSettings) -> str:
    return f"Rule {rule.name}: {rule.action}; {_filters(rule)}; {rule.resources}, {rule.act}.{_warning(rule)}"


def _filters(rule: RuleSettings) -> str:
    chosen: list[tuple[str, Sequence[str] | None]] = [("types", rule.event_types), ("sources", rule.event_sources)]
    filters = [f"{name} {', '.join(words)}" for name, words in chosen if words is not None]
    for word, bound in (("at least", rule.min_duration_seconds), ("at most", rule.max_duration_seconds)):
        filters += [] if bound is None else [f"{word} {bound:g} s"]
    filters += [] if rule.command is None else [f"after {rule.command[0]}"]
    return "; ".join(filters) or "every event"


def _warning(rule: RuleSettings) -> str:
    if rule.action == "approve" and not (rule.event_types or rule.event_sources) and rule.max_duration_seconds is None:
        return " WARNING: this approves evictions and deletions too, as soon as they are announced."
    return ""


def _try(settings: Settings, *, is_running: bool, broken: set[str]) -> bool:
    from bridge.cli.check_destinations import try_destinations  # noqa: PLC0415  # only who asks pays for it

    wrong: list[str] = []
    for tried in try_destinations(settings, is_running=is_running, broken=broken):
        failed = "FAILED: " if tried.is_wrong else ""
        _show(f"{tried.name}: {failed}{tried.message}", colour="bright_red" if tried.is_wrong else None)
        wrong += [tried.name] if tried.is_wrong else []
    if wrong:
        _show(f"Not as it must be from here: {', '.join(wrong)}.", colour="bright_red", bold=True)
    return not wrong
