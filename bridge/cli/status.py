"""Implements `status`, which prints the agent's state, its events, and its sinks.

`bridge.cli.status_json` collects the data. Text is never truncated, even on a narrow terminal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from bridge.agent.control_requests import read_status
from bridge.cli.connect import Reader
from bridge.cli.status_json import ConfigurationReport, EventReport, SinkReport, StatusReport, build_report
from bridge.cli.terminal import Colour, Table, ago, countdown, counted, size, styled, utc, wrapped
from bridge.clock import parse_time, utc_now
from bridge.config.approval import read_approval
from bridge.config.loader import configuration_in_words, directory_despite_errors, find_config, load_top, parsed
from bridge.config.loader import state_directory as directory_of
from bridge.config.mistakes import Problems
from bridge.config.trusted_keys import unusable_keys
from bridge.errors import ConfigurationError
from bridge.events.event import encode
from bridge.health.readiness import STUCK_SECONDS
from bridge.outbox.rows import PendingApproval, StoredDecision
from bridge.text import duration, one_line

_LABEL = "{:<7}"
_INDENT = " " * 7
_UNDER = "  "
_MOST_NAMES = 3
_BEHIND = "The outbox is not saved for {}: {} The agent continues from memory and approves nothing."
_NEXT_STEP = (
    "To list the records, run `outbox list`. The agent retries pending records by itself. To send parked records, or "
    "to continue after the status 410, run `outbox retry`."
)
_UNCONFIGURED = (
    "The sink {name} is not configured, so its records are not sent. To send the records to another sink, run "
    "`outbox move {name} NEW`. To discard the records, run `outbox discard --sink {name}`."
)
_EVENT_WIDTHS = (9, 9, 14, 20)
#: These states last until a person acts.
_RED = frozenset({"needs attention", "stuck"})


def show_status(*, path: Path | None, state_directory: Path | None, as_json: bool) -> None:
    """Print the status of the agent or of the outbox on disk."""
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
    try:
        return _readable_configuration(file, directory)
    except ConfigurationError as error:
        where = directory_despite_errors(config, error)
        return where, ConfigurationReport(problem=f"The configuration has errors, see check-config. {error}")


def _readable_configuration(file: Path | None, directory: Path | None) -> tuple[Path, ConfigurationReport]:
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
    # Do not load the complete configuration, which would import the modules of all sinks.
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

    problems = Problems()
    approval = read_approval(table["approval"], problems)
    if approval is None:
        raise ConfigurationError(*problems.sentences, file=file)
    keys = approval.trusted_keys()
    unsafe = unsafe_files(keys, configuration=file, directory=directory, users={agent_user(directory)})
    return unsafe, unusable_keys(keys)


def screen(report: StatusReport) -> list[str]:
    """Return the lines to print."""
    now = parse_time(report.at)
    events = [*_active_events(report, now), *_last_ending(report, now)]
    return [*_agent(report, now), "", *_facts(report, now), "", *events, "", *_sinks(report, now)]


def _agent(report: StatusReport, now: datetime) -> list[str]:
    agent = report.agent
    if agent is None:
        known = report.known_at
        when = "" if known is None else f" The last saved change was at {_moment(known, now)}."
        return _loud(f"The agent is not running.{when}", "bright_red")
    if not agent.reasons:
        lines = _loud("The agent is running and ready.", "green")
    else:
        lines = _loud("The agent is running, but not ready:", "bright_red")
    lines += [line for reason in agent.reasons for line in wrapped(reason, indent=_UNDER)]
    if agent.outbox_behind is not None:
        message = _BEHIND.format(duration(agent.outbox_behind_seconds), agent.outbox_behind)
        lines += [styled(line, colour="bright_red") for line in wrapped(message, indent=_UNDER)]
    return lines


def _loud(text: str, colour: Colour | None = None) -> list[str]:
    return [styled(line, bold=True, colour=colour) for line in wrapped(text)]


def _facts(report: StatusReport, now: datetime) -> list[str]:
    state, found, agent = report.state, report.configuration, report.agent
    limit = "" if found.max_bytes is None else f" of {size(found.max_bytes)}"
    file = (found.file or found.looked_for or "unknown") if agent is None else agent.configuration
    endpoint = found.imds_endpoint if agent is None else agent.imds
    polled = report.last_good_poll_at
    poll = "no good poll yet" if polled is None else f"last good poll {_moment(polled, now)}"
    lines = [
        *_fact("VM", report.vm.name or "unknown: IMDS has not returned the name yet"),
        *_fact("IMDS", poll if endpoint is None else f"{endpoint}, {poll}"),
        *_fact("State", f"{state.directory}, {size(state.outbox_bytes)}{limit}"),
        *_fact("Config", file or "none: the agent uses the defaults"),
        *([] if agent is None else _fact("Agent", f"version {agent.version}")),
    ]
    for warning in _warnings(report):
        lines += [styled(line, bold=True) for line in wrapped(warning, indent=_INDENT)]
    return lines


def _fact(label: str, text: str) -> list[str]:
    return wrapped(text, first=_LABEL.format(label), indent=_INDENT)


def _warnings(report: StatusReport) -> Iterator[str]:
    found, state, agent = report.configuration, report.state, report.agent
    is_known = found.file is not None or found.looked_for is not None
    if agent is not None and is_known and agent.configuration != (found.file or ""):
        own = found.file or "no file, so the defaults"
        yield f"This command uses another configuration ({own}) than the agent. Name the agent's file with --config."
    if agent is not None and agent.configuration_rejected:
        yield "The agent rejected its file at the last reload, and uses the earlier configuration. Run `check-config`."
    loaded = {sink.name for sink in report.sinks if sink.configured}
    if agent is not None and found.sinks is not None and loaded != set(found.sinks):
        yield "The agent has not loaded the sinks of this file. Run `check-config`, and then reload the service."
    if state.approvals_disabled:
        yield "Nothing is approved, because the file approvals.disabled exists."
    yield from (f"Nothing is approved. {why}" for why in found.approvals_unsafe)
    yield from (f"{why} Its decisions do not count." for why in found.unusable_keys)
    if state.kept_files:
        yield f"{counted(len(state.kept_files), 'older outbox file')} kept: {', '.join(state.kept_files)}."
    if found.problem is not None:
        yield found.problem


def _last_ending(report: StatusReport, now: datetime) -> list[str]:
    record = report.last_ending
    if record is None or record.event is None or record.impact is None:
        return []
    what = f"Last measured event: {record.event.event_type or 'unknown'} {record.transition.value}"
    return wrapped(f"{what} {_moment(record.observed_at, now)}. {record.impact.summary}.")


def _active_events(report: StatusReport, now: datetime) -> list[str]:
    if not report.events:
        return ["No scheduled events." if report.agent else "No scheduled events when the agent stopped."]
    table = Table(("EVENT", "STATUS", "STARTS", "NOT BEFORE", "AFFECTS"), widths=_EVENT_WIDTHS)
    rows = table.lines(map(_event_cells, report.events))
    lines = rows[:1]
    for event, row in zip(report.events, rows[1:], strict=True):
        lines.append(styled(row, bold=event.affects_this_vm is not False))
        lines += wrapped(_details(event, now), indent=_UNDER)
        for text in _approval_lines(event, now):
            lines += wrapped(f"approval: {text}", indent=_UNDER)
    return lines


def _event_cells(event: EventReport) -> tuple[str, ...]:
    seconds = event.seconds_to_not_before
    otherwise = "started" if event.event_status == "Started" else "unknown"
    starts = otherwise if seconds is None else countdown(seconds)
    return (
        event.event_type or "unknown",
        event.event_status,
        starts,
        "" if event.not_before is None else utc(event.not_before),
        _affected(event),
    )


def _affected(event: EventReport) -> str:
    names = event.resources or ()
    if not names:
        return "no VM named"
    if event.affects_this_vm is None:
        return counted(len(names), "VM")
    if not event.affects_this_vm:
        return counted(len(names), "other VM")
    return "this VM" if len(names) == 1 else f"this VM + {len(names) - 1}"


def _details(event: EventReport, now: datetime) -> str:
    parts = [event.event_id or "no EventId"]
    last = event.last_transition
    if last is not None:
        seconds = (now - parse_time(last.observed_at)).total_seconds()
        parts.append(f"{last.transition.value} ({last.evidence.value}) {ago(max(seconds, 0.0))}")
    if event.event_source is not None:
        parts.append(event.event_source)
    if event.duration_seconds is not None:
        parts.append(f"for {event.duration_seconds} s")
    names = event.resources or ()
    if 0 < len(names) <= _MOST_NAMES and not (event.affects_this_vm and len(names) == 1):
        parts.append(" ".join(names))
    return f"{parts[0]}  {', '.join(parts[1:])}".rstrip()


def _approval_lines(event: EventReport, now: datetime) -> list[str]:
    if event.event_status != "Scheduled":
        return []
    lines = [_decision(decision) for decision in event.decisions]
    return lines if event.approval is None else [_approval(event.approval, now), *lines]


def _approval(approval: PendingApproval, now: datetime) -> str:
    who = f" ({', '.join(approval.approvers)})" if approval.approvers else ""
    tries = "not sent yet"
    if approval.attempts:
        answer = "no response" if approval.http_status is None else f"HTTP {approval.http_status}"
        tries = f"{counted(approval.attempts, 'attempt')}, last result: {answer}"
    state = approval.state.value.replace("_", " ")
    return f"{state} {ago(now.timestamp() - approval.changed_at)}, requested by {approval.source}{who}, {tries}"


def _decision(decision: StoredDecision) -> str:
    state = decision.state.value.replace("_", " ")
    text = f"{decision.verdict.value} by {decision.approver} ({decision.source}), {state}"
    return text if decision.reason is None else f"{text}: {decision.reason}"


def _sinks(report: StatusReport, now: datetime) -> list[str]:
    shown = [sink for sink in report.sinks if sink.configured is not False or sink.pending or sink.parked]
    if not shown:
        return ["No sinks."]
    table = Table(("SINK", "STATE", "PENDING", "OLDEST", "PARKED", "DELIVERED"))
    rows = table.lines([_sink_cells(sink) for sink in shown])
    lines = rows[:1]
    for sink, row in zip(shown, rows[1:], strict=True):
        state = _state_of(sink)
        lines.append(styled(row, bold=state != "ok", colour="bright_red" if state in _RED else None))
        if sink.last_error is not None and (sink.pending or sink.parked):
            when = "" if sink.last_error_at is None else f" {_moment(sink.last_error_at, now)}"
            lines += wrapped(f"last error{when}: {sink.last_error}", indent=_UNDER)
        if sink.configured is False:
            lines += wrapped(_UNCONFIGURED.format(name=one_line(sink.name)), indent=_UNDER)
    if not {_state_of(sink) for sink in shown} <= {"ok", "not configured"}:
        lines += ["", *wrapped(_NEXT_STEP)]
    return lines


def _state_of(sink: SinkReport) -> str:
    if sink.configured is False:
        return "not configured"
    if sink.needs_attention:
        return "needs attention"
    if sink.oldest_pending_seconds > STUCK_SECONDS:
        return "stuck"
    if sink.pending and sink.last_error is not None:
        return "failing"
    return "has parked" if sink.parked else "ok"


def _sink_cells(sink: SinkReport) -> tuple[str, ...]:
    oldest = duration(sink.oldest_pending_seconds) if sink.pending else ""
    return one_line(sink.name), _state_of(sink), str(sink.pending), oldest, str(sink.parked), str(sink.delivered)


def _moment(text: str, now: datetime) -> str:
    moment = parse_time(text)
    return f"{utc(moment)} ({ago(max((now - moment).total_seconds(), 0.0))})"
