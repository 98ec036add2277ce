"""The screen of `status`: whether the agent runs, then the events ahead, then the sinks with what is pending.

At 80 columns nothing is cut: events take two lines each, errors are wrapped under their sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from bridge.cli.status_json import ApprovalReport, DecisionReport, EventReport, SinkReport, StatusReport
from bridge.cli.terminal import Colour, Table, ago, countdown, counted, size, styled, utc, with_label, wrapped
from bridge.clock import parse_time
from bridge.health.client import EVENTS_UNKNOWN, EVENTS_UNKNOWN_YET
from bridge.outbox.approvals import ApprovalStage, DecisionStage
from bridge.text import duration, one_line

_LABEL = "{:<7}"
_INDENT = " " * 7
_UNDER = "  "
_MOST_NAMES = 3
_REFUSING = (
    "It works from memory, because the disk under its outbox refuses writes: free the disk, or make it writable. "
    "Events and errors below are those of before; what it knows since is lost if it dies."
)
_LOADING = (
    "It works from memory until its outbox is loaded. Events, counts and errors below are those of before; what it "
    "sees meanwhile is stored then."
)
_EVENT_WIDTHS = (9, 9, 14, 20)
_OF_APPROVAL = {
    ApprovalStage.DRAINING: "{source}: its command runs before the event is approved",
    ApprovalStage.WANTED: "{source} wants it approved; {tries}",
    ApprovalStage.POSTED: "approved by {source} {since}; Azure has not started it yet",
    ApprovalStage.DRY_RUN: "{source} would have approved it {since} (dry_run)",
    ApprovalStage.COMMAND_FAILED: "not approved: the command of {source} failed {since}",
    ApprovalStage.WITHDRAWN: "an approval by {source} was withdrawn {since}",
}
_OF_DECISION = {
    DecisionStage.NEW: "a decision of {who} ({verdict}) waits for the agent to look at it",
    DecisionStage.WAITING: "{who} said {verdict}, which is not enough or not done yet",
    DecisionStage.ON_HOLD: "held by {who}",
}


def screen(report: StatusReport) -> list[str]:
    """Return the lines to print."""
    now = parse_time(report.at)
    return [*_agent(report, now), "", *_facts(report, now), "", *_events(report, now), "", *_sinks(report, now)]


# Whether it runs.


def _agent(report: StatusReport, now: datetime) -> list[str]:
    agent = report.agent
    if agent.running is False:
        known = report.known_at
        when = "" if known is None else f"; this is what it knew at {_moment(known, now)}"
        lines = _loud(f"The agent is not running{when}.", "bright_red")
    elif agent.running is None:
        lines = _loud("Whether the agent is running cannot be seen: you may not open its directory.")
    elif agent.ready is None:
        lines = _loud("The agent is running. This is what its outbox says:")
    elif agent.ready:
        lines = _loud("The agent is running and ready.", "green")
    else:
        lines = _loud("The agent is running, but not ready:", "bright_red")
    lines += [line for reason in agent.reasons for line in wrapped(reason, indent=_UNDER)]
    if agent.problem is not None:
        lines += wrapped(agent.problem, indent=_UNDER)
    elif agent.running and agent.asked is None:
        lines += wrapped("It was not asked for more: status.listen is off, or names no fixed port.", indent=_UNDER)
    if report.state.in_memory:
        message = _LOADING if report.state.loading else _REFUSING
        lines += [styled(line, colour="bright_red") for line in wrapped(message, indent=_UNDER)]
    return lines


def _loud(text: str, colour: Colour | None = None) -> list[str]:
    return [styled(line, bold=True, colour=colour) for line in wrapped(text)]


# Where it runs.


def _facts(report: StatusReport, now: datetime) -> list[str]:
    state = report.state
    of = "" if state.max_bytes is None else f" of {size(state.max_bytes)}"
    lines = [
        *_fact("VM", report.vm.name or "unknown: IMDS has not said yet"),
        *_fact("IMDS", _imds(report, now)),
        *_fact("State", f"{state.directory}, {size(state.outbox_bytes)}{of}"),
        *_fact("Config", _configuration(report)),
        *_fact("Agent", _version(report)),
    ]
    warnings = list(_another_file(report))
    if state.approvals_disabled:
        warnings.append("The file approvals.disabled is there: nothing is approved.")
    warnings += [f"Nothing is approved. {why}" for why in state.approvals_unsafe]
    warnings += [f"{why} Its decisions do not count." for why in state.unusable_keys]
    if state.set_aside:
        names = ", ".join(aside.name for aside in state.set_aside)
        warnings.append(
            f"{counted(len(state.set_aside), 'database')} set aside, to be deleted when nobody needs them: {names}."
        )
    if report.configuration_problem is not None:
        warnings.append(report.configuration_problem)
    for warning in warnings:
        lines += [styled(line, bold=True) for line in wrapped(warning, indent=_INDENT)]
    return lines


def _fact(label: str, text: str) -> list[str]:
    return wrapped(text, first=_LABEL.format(label), indent=_INDENT)


def _imds(report: StatusReport, now: datetime) -> str:
    imds = report.imds
    where = "" if imds.endpoint is None else f"{imds.endpoint}, "
    if imds.last_good_poll_at is None:
        return f"{where}no good poll yet"
    when = _moment(imds.last_good_poll_at, now, seconds_ago=imds.last_good_poll_seconds_ago)
    stored = "" if imds.last_good_poll_is_live or not report.agent.running else ", as stored every ten minutes"
    return f"{where}last good poll {when}{stored}"


def _configuration(report: StatusReport) -> str:
    found = report.configuration
    if found.agent_file is not None:
        return found.agent_file or "none: the agent runs on the defaults"
    own = found.file or found.looked_for or "not known here"
    return f"{own} (as this command finds it; the agent does not say)" if report.agent.running else own


def _version(report: StatusReport) -> str:
    own, of_agent = report.configuration.version, report.agent.version
    if of_agent is None:
        return f"its version is not known; this command is version {own}"
    return f"version {of_agent}" + ("" if of_agent == own else f"; this command is version {own}")


def _another_file(report: StatusReport) -> Iterator[str]:
    """Yield that the agent runs on another configuration than this command has read."""
    found = report.configuration
    is_known = found.agent_file is not None and (found.file is not None or found.looked_for is not None)
    if is_known and found.agent_file != (found.file or ""):
        own = found.file or "no file, so the defaults"
        yield f"The agent runs on another configuration than this command has read ({own}): name it with --config."


# What is coming.


def _events(report: StatusReport, now: datetime) -> list[str]:
    if not report.events and report.state.in_memory:
        unknown = EVENTS_UNKNOWN_YET if report.state.loading else EVENTS_UNKNOWN
        return [styled(line, colour="bright_red") for line in wrapped(unknown)]
    if not report.events:
        was = "is" if report.agent.running else "was"
        return [f"There {was} no scheduled event."]
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
    if seconds is not None:
        starts = countdown(seconds)
    else:
        starts = "under way" if event.event_status == "Started" else "unknown"
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
        return "no VM is named"
    if event.affects_this_vm is None:
        return counted(len(names), "VM")
    if not event.affects_this_vm:
        return f"{counted(len(names), 'other VM')}"
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
    tries = "not tried yet"
    if approval.attempts:
        answer = "no answer" if approval.http_status is None else f"answer {approval.http_status}"
        tries = f"tried {counted(approval.attempts, 'time')}, last {answer}"
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


# What the sinks have and wait for.


def _sinks(report: StatusReport, now: datetime) -> list[str]:
    shown = [sink for sink in report.sinks if sink.configured is not False or sink.pending or sink.parked]
    if not shown:
        return ["There is no sink."]
    table = Table(("SINK", "STATE", "PENDING", "OLDEST", "PARKED", "DELIVERED"))
    rows = table.lines([_sink_cells(sink) for sink in shown])
    lines = rows[:1]
    for sink, row in zip(shown, rows[1:], strict=True):
        state = _state_of(sink)
        lines.append(styled(row, bold=True, colour=_COLOURS[state]) if state in _COLOURS else row)
        if sink.last_error is not None and (sink.pending or sink.parked):
            when = "" if sink.last_error_at is None else f" {_moment(sink.last_error_at, now)}"
            lines += wrapped(f"last error{when}: {sink.last_error}", indent=_UNDER)
    if any(sink.pending and sink.configured is False for sink in shown):
        lines += ["", *wrapped("A sink that is not configured gets nothing: put it back, or `outbox discard`.")]
    if any(_state_of(sink) in _COLOURS for sink in shown):
        lines += ["", *wrapped("`outbox list` has each record; once mended, `outbox retry` has them tried at once.")]
    return lines


_NOT_CONFIGURED, _NEEDS_A_PERSON, _STUCK = "not configured", "needs a person", "stuck"
_FAILING, _REFUSED, _OK = "failing", "refused some", "ok"
#: All but `ok`; in red what nobody but a person ends.
_COLOURS: dict[str, Colour | None] = {
    _NOT_CONFIGURED: None,
    _NEEDS_A_PERSON: "bright_red",
    _STUCK: "bright_red",
    _FAILING: None,
    _REFUSED: None,
}


def _state_of(sink: SinkReport) -> str:
    """Return the one word for *sink*, the worst first."""
    if sink.configured is False:
        return _NOT_CONFIGURED
    if sink.needs_attention:
        return _NEEDS_A_PERSON
    if sink.is_stuck:
        return _STUCK
    if sink.pending and sink.last_error is not None:
        return _FAILING
    return _REFUSED if sink.parked else _OK


def _sink_cells(sink: SinkReport) -> tuple[str, ...]:
    oldest = duration(sink.oldest_pending_seconds) if sink.pending else ""
    return one_line(sink.name), _state_of(sink), str(sink.pending), oldest, str(sink.parked), str(sink.delivered)


def _moment(text: str, now: datetime, *, seconds_ago: float | None = None) -> str:
    moment = parse_time(text)
    seconds = (now - moment).total_seconds() if seconds_ago is None else seconds_ago
    return f"{utc(moment)} ({ago(max(seconds, 0.0))})"
