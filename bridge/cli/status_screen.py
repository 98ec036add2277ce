"""The screen of `status`: the agent, its events, and its sinks.

Nothing is cut at 80 columns: each event takes two lines, and errors are wrapped below their sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from bridge.cli.status_json import ApprovalReport, DecisionReport, EventReport, SinkReport, StatusReport
from bridge.cli.terminal import Colour, Table, ago, countdown, counted, size, styled, utc, with_label, wrapped
from bridge.clock import parse_time
from bridge.outbox.rows import ApprovalStage, DecisionStage
from bridge.text import duration, one_line

_LABEL = "{:<7}"
_INDENT = " " * 7
_UNDER = "  "
_MOST_NAMES = 3
_BEHIND = "The outbox is not saved for {}: {} The agent continues from memory and approves nothing."
_EVENT_WIDTHS = (9, 9, 14, 20)
_OF_APPROVAL = {
    ApprovalStage.DRAINING: "the command of {source} is running",
    ApprovalStage.WANTED: "requested by {source}, {tries}",
    ApprovalStage.POSTED: "approved by {source} {since}, not started by Azure yet",
    ApprovalStage.DRY_RUN: "dry run: {source} would have approved the event {since}",
    ApprovalStage.COMMAND_FAILED: "not approved: the command of {source} failed {since}",
    ApprovalStage.WITHDRAWN: "withdrawn {since}, requested by {source}",
}
_OF_DECISION = {
    DecisionStage.NEW: "decision of {who} ({verdict}), not evaluated yet",
    DecisionStage.WAITING: "decision of {who} ({verdict}), waiting for more approvers or for Azure",
    DecisionStage.ON_HOLD: "hold of {who}",
}


def screen(report: StatusReport) -> list[str]:
    """Return the lines to print."""
    now = parse_time(report.at)
    return [*_agent(report, now), "", *_facts(report, now), "", *_events(report, now), "", *_sinks(report, now)]


def _agent(report: StatusReport, now: datetime) -> list[str]:
    agent = report.agent
    if not agent.running:
        known = report.known_at
        when = "" if known is None else f" Its last stored change: {_moment(known, now)}."
        lines = _loud(f"The agent is not running.{when}", "bright_red")
    elif agent.ready:
        lines = _loud("The agent is running and ready.", "green")
    else:
        lines = _loud("The agent is running, but not ready:", "bright_red")
    lines += [line for reason in agent.reasons for line in wrapped(reason, indent=_UNDER)]
    behind = report.state.behind
    if behind is not None:
        message = _BEHIND.format(duration(behind.seconds), behind.reason)
        lines += [styled(line, colour="bright_red") for line in wrapped(message, indent=_UNDER)]
    return lines


def _loud(text: str, colour: Colour | None = None) -> list[str]:
    return [styled(line, bold=True, colour=colour) for line in wrapped(text)]


def _facts(report: StatusReport, now: datetime) -> list[str]:
    state = report.state
    of = "" if state.max_bytes is None else f" of {size(state.max_bytes)}"
    lines = [
        *_fact("VM", report.vm.name or "unknown: IMDS has not responded yet"),
        *_fact("IMDS", _imds(report, now)),
        *_fact("State", f"{state.directory}, {size(state.outbox_bytes)}{of}"),
        *_fact("Config", _configuration(report)),
        *_fact("Agent", _version(report)),
    ]
    for warning in _warnings(report):
        lines += [styled(line, bold=True) for line in wrapped(warning, indent=_INDENT)]
    return lines


def _fact(label: str, text: str) -> list[str]:
    return wrapped(text, first=_LABEL.format(label), indent=_INDENT)


def _imds(report: StatusReport, now: datetime) -> str:
    imds = report.imds
    where = "" if imds.endpoint is None else f"{imds.endpoint}, "
    if imds.last_good_poll_at is None:
        return f"{where}no good poll yet"
    return f"{where}last good poll {_moment(imds.last_good_poll_at, now, seconds_ago=imds.last_good_poll_seconds_ago)}"


def _configuration(report: StatusReport) -> str:
    found = report.configuration
    if found.agent_file is not None:
        return found.agent_file or "none: the agent uses the defaults"
    return found.file or found.looked_for or "unknown"


def _version(report: StatusReport) -> str:
    own, of_agent = report.configuration.version, report.agent.version
    if of_agent is None:
        return f"unknown version. This command has version {own}."
    return f"version {of_agent}" if of_agent == own else f"version {of_agent}. This command has version {own}."


def _warnings(report: StatusReport) -> Iterator[str]:
    found, state = report.configuration, report.state
    is_known = found.agent_file is not None and (found.file is not None or found.looked_for is not None)
    if is_known and found.agent_file != (found.file or ""):
        own = found.file or "no file, so the defaults"
        yield f"The agent uses another configuration than this command ({own}). Name it with --config."
    if state.approvals_disabled:
        yield "Nothing is approved, because the file approvals.disabled exists."
    yield from (f"Nothing is approved. {why}" for why in state.approvals_unsafe)
    yield from (f"{why} Its decisions do not count." for why in state.unusable_keys)
    if state.kept_files:
        names = ", ".join(file.name for file in state.kept_files)
        yield f"{counted(len(state.kept_files), 'older outbox file')} kept: {names}."
    if report.configuration_problem is not None:
        yield report.configuration_problem


def _events(report: StatusReport, now: datetime) -> list[str]:
    if not report.events:
        return ["No scheduled events." if report.agent.running else "No scheduled events when the agent stopped."]
    table = Table(("EVENT", "STATUS", "STARTS", "NOT BEFORE", "AFFECTS"), widths=_EVENT_WIDTHS)
    rows = table.lines(map(_event_cells, report.events))
    lines = rows[:1]
    for event, row in zip(report.events, rows[1:], strict=True):
        lines.append(styled(row, bold=True) if event.affects_this_vm is not False else row)
        lines += wrapped(_details(event), indent=_UNDER)
        for text in _approval_lines(event, now):
            lines += with_label(wrapped(f"approval: {text}", indent=_UNDER), "approval:")
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


def _details(event: EventReport) -> str:
    parts = [event.event_id or "no EventId"]
    last = event.last_transition
    if last is not None:
        parts.append(f"{last.transition.value} ({last.evidence.value}) {ago(last.seconds_ago)}")
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


def _approval(approval: ApprovalReport, now: datetime) -> str:
    tries = "not sent yet"
    if approval.attempts:
        answer = "no response" if approval.http_status is None else f"HTTP {approval.http_status}"
        tries = f"{counted(approval.attempts, 'attempt')}, last result: {answer}"
    who = f" ({', '.join(approval.approvers)})" if approval.approvers else ""
    return _OF_APPROVAL[approval.state].format(
        source=f"{approval.source}{who}",
        tries=tries,
        since=ago((now - parse_time(approval.changed_at)).total_seconds()),
    )


def _decision(decision: DecisionReport) -> str:
    who = f"{decision.approver} ({decision.source})"
    text = _OF_DECISION[decision.state].format(who=who, verdict=decision.verdict.value)
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
        lines.append(styled(row, bold=True, colour=_COLOURS[state]) if state in _COLOURS else row)
        if sink.last_error is not None and (sink.pending or sink.parked):
            when = "" if sink.last_error_at is None else f" {_moment(sink.last_error_at, now)}"
            lines += wrapped(f"last error{when}: {sink.last_error}", indent=_UNDER)
        if sink.configured is False:
            lines += wrapped(_move_or_discard(sink), indent=_UNDER)
    if any(_state_of(sink) in _COLOURS for sink in shown):
        lines += ["", *wrapped("`outbox list` lists the records. After a fix, `outbox retry` sends them at once.")]
    return lines


def _move_or_discard(sink: SinkReport) -> str:
    name = one_line(sink.name)
    return (
        f"{name} is not configured, so nothing is sent to it. To send the records to another sink, run "
        f"`outbox move {name} NEW`. To give them up, run `outbox discard --sink {name}`."
    )


_NOT_CONFIGURED, _NEEDS_ATTENTION, _STUCK = "not configured", "needs attention", "stuck"
_FAILING, _HAS_PARKED, _OK = "failing", "has parked", "ok"
#: All states except ok; red: only a person can end the state.
_COLOURS: dict[str, Colour | None] = {
    _NOT_CONFIGURED: None,
    _NEEDS_ATTENTION: "bright_red",
    _STUCK: "bright_red",
    _FAILING: None,
    _HAS_PARKED: None,
}


def _state_of(sink: SinkReport) -> str:
    """Return the most severe state of *sink*."""
    if sink.configured is False:
        return _NOT_CONFIGURED
    if sink.needs_attention:
        return _NEEDS_ATTENTION
    if sink.is_stuck:
        return _STUCK
    if sink.pending and sink.last_error is not None:
        return _FAILING
    return _HAS_PARKED if sink.parked else _OK


def _sink_cells(sink: SinkReport) -> tuple[str, ...]:
    oldest = duration(sink.oldest_pending_seconds) if sink.pending else ""
    return one_line(sink.name), _state_of(sink), str(sink.pending), oldest, str(sink.parked), str(sink.delivered)


def _moment(text: str, now: datetime, *, seconds_ago: float | None = None) -> str:
    moment = parse_time(text)
    seconds = (now - moment).total_seconds() if seconds_ago is None else seconds_ago
    return f"{utc(moment)} ({ago(max(seconds, 0.0))})"
