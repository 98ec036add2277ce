"""`status`: the state of the agent, its events, and its sinks, on a screen or as JSON.

The exit code is 0 for every state, because /readyz reports health. The exit code is 1 if there is no outbox, or if it
cannot be read. The running agent answers. Without an agent, the command reads the stored outbox. The configuration adds
the names of the configured sinks and the checks of the files that approvals depend on.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from bridge.agent.requests import Status
from bridge.cli.connect import Reader
from bridge.cli.status_json import LocalFacts, StatusReport, build_report
from bridge.cli.status_screen import screen
from bridge.cli.terminal import in_place, is_terminal, utc, wrapped
from bridge.clock import utc_now
from bridge.config.loader import configuration_in_words, find_config, load_top, parsed, state_directory
from bridge.errors import BridgeError, ConfigurationError
from bridge.events.event import encode


def watch_status(config: Path | None, directory: Path | None, *, seconds: float) -> None:
    """Show the status every *seconds* until interrupted; an error is shown in its place."""
    if is_terminal():  # moves the text above into the scrollback
        click.echo("\n" * (shutil.get_terminal_size().lines - 1), nl=False)
    while True:
        try:
            lines = screen(_report(config, directory))
        except BridgeError as error:
            lines = [line for text in str(error).split("\n") for line in wrapped(text, first="", indent="  ")]
        lines += ["", f"{utc(utc_now())}, updated every {seconds:g} s. Press Ctrl-C to exit."]
        click.echo(in_place(lines) if is_terminal() else "\n".join([*lines, ""]), nl=False, color=is_terminal() or None)
        sys.stdout.flush()
        threading.Event().wait(seconds)


def show_status(config: Path | None, directory: Path | None, *, as_json: bool) -> None:
    """Print the status of the outbox in *directory*, by default the directory of the configuration.

    Raises ConfigurationError if the configuration is wrong and *directory* is None, and BridgeError if no agent
    answers and no outbox can be read.
    """
    report = _report(config, directory)
    if as_json:
        click.echo(encode(report))
        return
    for line in screen(report):
        click.echo(line)


def _report(config: Path | None, directory: Path | None) -> StatusReport:
    where, local = _local(config, directory)
    answer = Reader(where).ask(Status())
    return build_report(answer, directory=where, local=local, now=utc_now())


def _local(config: Path | None, directory: Path | None) -> tuple[Path, LocalFacts]:
    """Return the state directory, and the facts of the configuration if it belongs to that directory."""
    try:
        file = find_config(config, os.environ)
        settings = load_top(file, os.environ)
        own = state_directory(settings, os.environ)
        table = {} if file is None else parsed(file)
        sinks = _sink_names(table)
        approvals_unsafe, unusable_keys = _approval_files(table, file, directory or own)
    except ConfigurationError as error:
        if directory is None:
            hint = "`status --state-directory DIRECTORY` works without the configuration."
            raise ConfigurationError(*error.mistakes, hint, file=error.file) from error
        problem = "The configuration is wrong, so the configured sinks are unknown. Run `check-config`."
        return directory, LocalFacts(problem=problem)
    if config is None and directory is not None and own.absolute() != directory.absolute():
        problem = f"The configuration found is for {own}. Use --config to name the configuration of this directory."
        return directory, LocalFacts(problem=problem)
    return directory or own, LocalFacts(
        file=None if file is None else str(file.absolute()),
        looked_for=configuration_in_words(None, os.environ) if file is None else None,
        sinks=sinks,
        vm_name=settings.vm.name,
        imds_endpoint=settings.imds.endpoint,
        max_bytes=settings.state.max_bytes,
        approvals_unsafe=approvals_unsafe,
        unusable_keys=unusable_keys,
    )


def _sink_names(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the configured sinks; reading the sinks themselves would import their types."""
    tables = table.get("sinks") or [{"type": "stdout"}]
    if not isinstance(tables, list):
        raise ConfigurationError("`sinks` is not a list of tables. Write each sink as [[sinks]].")
    return tuple(str(each.get("name") or str(each.get("type", "")).replace(":", ".")) for each in tables)


def _approval_files(
    table: Mapping[str, Any], file: Path | None, directory: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files that make approvals unsafe, and the unusable keys."""
    if "approval" not in table:
        return (), ()
    from bridge.approval.files import agent_user, unsafe_files  # noqa: PLC0415  # only with approvals
    from bridge.config.approval import read_approval  # noqa: PLC0415
    from bridge.config.mistakes import Problems  # noqa: PLC0415
    from bridge.config.trusted_keys import unusable_keys  # noqa: PLC0415

    problems = Problems()
    approval = read_approval(table["approval"], problems)
    if approval is None or problems.sentences:
        raise ConfigurationError(*problems.sentences, file=file)
    keys = approval.trusted_keys()
    unsafe = unsafe_files(keys, configuration=file, directory=directory, users={agent_user(directory)})
    return unsafe, unusable_keys(keys)
