"""Prints the report of `check-config`: the settings in effect and the problems."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import click

from bridge.cli.check_config.local import advice_for_root, local_problems, warnings
from bridge.cli.terminal import Colour, counted, styled, wrapped
from bridge.config.approval import ApprovalSettings
from bridge.config.loader import Settings, configuration_in_words, find_config, load, state_directory
from bridge.exit_codes import ExitCode
from bridge.outbox.lock import is_locked
from bridge.system.permissions import user_name
from bridge.text import one_line

_NAME = "scheduled-events-bridge"


def check_configuration(path: Path | None, *, connect: bool) -> int:
    """Print the report, and return the exit code."""
    settings = load(find_config(path, os.environ), os.environ)
    directory = state_directory(settings, os.environ)
    problems = local_problems(settings, directory)
    is_running = is_locked(directory) is True
    _show(_headline(len(problems), connect=connect), colour="bright_red" if problems else "green", bold=True)
    runs = "; an agent is running on it" if is_running else ""
    _show(f"State: {directory.absolute()}{runs}. IMDS: {settings.imds.endpoint}. Checked as {user_name()}.")
    file = configuration_in_words(settings.file, os.environ)
    _show(f"Configuration: {file}. This is version {version(_NAME)}.")
    for key, variable in settings.overrides:
        _show(f"From the environment: {key} is {os.environ[variable]!r} (${variable}).")
    _show(f"Sinks: {', '.join(f'{sink.name} ({sink.type_name})' for sink in settings.sinks)}.")
    if settings.has_default_sinks:
        _show("The configuration has no [[sinks]] table. `scheduled-events-bridge init --sink webhook` prints one.")
    _show(_approvals(settings.approval))
    if settings.push is not None:
        _show(f"Telemetry: metrics to {settings.push.url} every {settings.push.interval_seconds:g} s.")
    for warning in warnings(settings):
        _show(f"Warning: {warning}", bold=True)
    for advice in advice_for_root(directory):  # contains a command, which must stay on one line
        click.echo(styled(one_line(f"Warning: {advice}"), bold=True))
    for problem in problems:
        _show(f"Problem: {problem.where}: {problem.message}", colour="bright_red")
    broken = {problem.where for problem in problems}
    is_reached = not connect or _try(settings, is_running=is_running, broken=broken)
    return ExitCode.FAILED if problems or not is_reached else ExitCode.OK


def _show(text: str, *, colour: Colour | None = None, bold: bool = False) -> None:
    for line in wrapped(text, first="", indent="  "):
        click.echo(styled(line, colour=colour, bold=bold))


def _headline(count: int, *, connect: bool) -> str:
    if count:
        return f"The configuration is valid, but this machine has {counted(count, 'problem')}."
    return "The configuration is valid." + (" The results of the destinations follow." if connect else "")


def _approvals(approval: ApprovalSettings | None) -> str:
    if approval is None:
        return "Approvals: none. The agent never posts an approval."
    rules = ", ".join(f"{rule.name} ({rule.action})" for rule in approval.rules)
    sentences = [f"Approvals: by the rules {rules}." if rules else "Approvals: no rules. The command `approve` works."]
    if approval.remote is not None:
        approvers = ", ".join(sorted({key.approver for key in approval.remote.keys}))
        sentences.append(
            f"Portal {approval.remote.url}: {approval.remote.required_approvals} of {approvers} must approve."
        )
    if approval.dry_run:
        sentences.append("dry_run: the agent never posts an approval.")
    return " ".join(sentences)


def _try(settings: Settings, *, is_running: bool, broken: set[str]) -> bool:
    from bridge.cli.check_config.destinations import try_destinations  # noqa: PLC0415  # only for --connect

    failed: list[str] = []
    for tried in try_destinations(settings, is_running=is_running, broken=broken):
        label = "FAILED: " if tried.is_failed else ""
        _show(f"{tried.name}: {label}{tried.message}", colour="bright_red" if tried.is_failed else None)
        failed += [tried.name] if tried.is_failed else []
    if failed:
        _show(f"Failed from this machine: {', '.join(failed)}.", colour="bright_red", bold=True)
    return not failed
