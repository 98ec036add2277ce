"""`status`: the state of the agent, its events, and its sinks, on a screen or as JSON.

The exit code is 0 for every state, because /readyz reports health. The exit code is 1 if there is no outbox, or if it
cannot be read. The running agent answers. Without an agent, the command reads the stored outbox. The configuration adds
the names of the configured sinks and the checks of the files that approvals depend on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from bridge.agent.requests import read_status
from bridge.cli.connect import Reader
from bridge.cli.status_json import ConfigurationReport, build_report
from bridge.cli.status_screen import screen
from bridge.clock import utc_now
from bridge.config.loader import configuration_in_words, find_config, load_top, parsed
from bridge.config.loader import state_directory as directory_of
from bridge.errors import ConfigurationError
from bridge.events.event import encode


def show_status(*, path: Path | None, state_directory: Path | None, as_json: bool) -> None:
    """Print the status of the outbox in *state_directory*, by default the directory of the configuration.

    Raises ConfigurationError if the configuration is invalid, and BridgeError if no agent responds and no outbox can be
    read. *state_directory* without *path* needs no configuration.
    """
    where, configuration = _configuration(path, state_directory)
    answer = Reader(where).ask(read_status)
    report = build_report(answer, directory=where, configuration=configuration, now=utc_now())
    for line in [encode(report).decode()] if as_json else screen(report):
        click.echo(line)


def _configuration(config: Path | None, directory: Path | None) -> tuple[Path, ConfigurationReport]:
    if directory is not None and config is None:
        problem = "The configured sinks are unknown. Use --config to name the configuration of this directory."
        return directory, ConfigurationReport(problem=problem)
    file = find_config(config, os.environ)
    settings = load_top(file, os.environ)
    directory = directory or directory_of(settings, os.environ)
    table = {} if file is None else parsed(file)
    approvals_unsafe, unusable_keys = _approval_files(table, file, directory)
    return directory, ConfigurationReport(
        file=None if file is None else str(file.absolute()),
        looked_for=configuration_in_words(None, os.environ) if file is None else None,
        sinks=_sink_names(table),
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
