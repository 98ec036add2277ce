"""What the commands that end by themselves do and print: tables for a person, JSON lines for a program."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import click
import msgspec

from bridge.approval_commands import describe_approval
from bridge.beside import Beside, DeliveryRow
from bridge.config import Settings, SinkSettings
from bridge.errors import BridgeError
from bridge.identity import merged
from bridge.imds import client_of
from bridge.record import (
    Evidence,
    ScheduledEvent,
    Transition,
    TransitionRecord,
    VmIdentity,
    encode,
    format_time,
    parse_time,
    record_id,
    transition_key,
)
from bridge.sending import Sender
from bridge.store import utc_now

_FOLLOW_SECONDS = 0.5
_IDENTITY_SECONDS = 2.0
_IMDS = "imds"
Result = tuple[str, "str | None"]
"""A destination's name, and what is wrong with it, null when nothing is."""


def describe_settings(settings: Settings, directory: Path) -> str:
    """Return what the configuration comes to, a line each."""
    lines = [f"The configuration is right. State: {directory}. IMDS: {settings.imds.endpoint}."]
    for sink in settings.sinks:
        filters = [
            f"{name} {', '.join(chosen)}"
            for name, chosen in (
                ("transitions", sink.config.transitions),
                ("event types", sink.config.event_types),
                ("event sources", sink.config.event_sources),
            )
            if chosen is not None
        ]
        lines.append(f"Sink {sink.name} ({sink.type_name}): scope {sink.config.scope}; {'; '.join(filters) or 'all'}.")
    return "\n".join([*lines, *describe_approval(settings.approval)])


def try_destinations(settings: Settings) -> list[Result]:
    """Try IMDS and each sink's destination, without writing to it."""
    results = [(_IMDS, _problem_of_imds(settings))]
    results.extend((sink.name, _problem_of(sink, None)) for sink in settings.sinks)
    return results


def _problem_of_imds(settings: Settings) -> str | None:
    try:
        with closing(client_of(settings.imds, at_most_seconds=settings.imds.timeout_seconds)) as imds:
            imds.identity()
    except BridgeError as error:
        return str(error)
    return None


def _problem_of(sink: SinkSettings, record: TransitionRecord | None) -> str | None:
    """Send *record* to *sink*, or only try it for null; return what was wrong."""
    sender = Sender(sink.build, name=sink.name, timeout_seconds=sink.config.timeout_seconds)
    try:
        if record is None:
            sender.check()
        else:
            sender.send([record])
    except Exception as error:  # noqa: BLE001  # anything a sink raises is an answer to the person who asked
        return str(error) or type(error).__name__
    finally:
        sender.close()
    return None


def send_test(settings: Settings, names: Sequence[str]) -> list[Result]:
    """Send a test record straight to the sinks called *names*, or to all but those that run a command."""
    by_name = {sink.name: sink for sink in settings.sinks}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise click.UsageError(f"No sink is called {unknown[0]!r}. Configured: {', '.join(by_name)}.")
    chosen = [by_name[name] for name in names] or [
        sink for sink in settings.sinks if not sink.sink_class.send_test_by_name_only
    ]
    for sink in settings.sinks:
        if sink not in chosen and not names:
            click.echo(f"{sink.name}: left out, it runs a program; name it to run that.", err=True)
    record = _test_record(settings)
    return [(sink.name, _problem_of(sink, record)) for sink in chosen]


def _found_identity(settings: Settings) -> VmIdentity:
    """Return who this VM is, as far as IMDS says so quickly: a test away from Azure works as well."""
    try:
        with closing(client_of(settings.imds, at_most_seconds=_IDENTITY_SECONDS)) as imds:
            return imds.identity()
    except BridgeError:
        return VmIdentity()


def _test_record(settings: Settings) -> TransitionRecord:
    now = utc_now()
    vm = merged(_found_identity(settings), settings.vm)
    name = vm.name or "this-vm"
    event = ScheduledEvent(
        event_id=f"TEST-{now:%Y%m%dT%H%M%S.%fZ}",
        event_type="Freeze",
        event_status="Scheduled",
        resource_type="VirtualMachine",
        resources=(name,),
        not_before=(now + timedelta(minutes=15)).replace(microsecond=0),
        not_before_raw=None,
        description="A test of this sink. Nothing happens to the virtual machine.",
        event_source="User",
        duration_seconds=0,
    )
    return TransitionRecord(
        id=record_id(vm_key=name, event_key=event.key, transition=Transition.TEST, incarnation=None, event=event),
        transition_key=transition_key(event.key, Transition.TEST, event),
        stream_id="00000000-0000-0000-0000-000000000000",
        sequence=0,
        transition=Transition.TEST,
        evidence=Evidence.OBSERVED,
        observed_at=format_time(now),
        incarnation=None,
        previous_incarnation=None,
        event=event,
        previous=None,
        changed=(),
        notice_seconds=900.0,
        affects_this_vm=True,
        vm=vm,
        labels=dict(settings.labels),
    )


def list_events(directory: Path, *, limit: int, follow: bool, as_json: bool) -> None:
    """Print the newest *limit* records, oldest first, then new ones as they come when *follow*."""
    with Beside(directory) as beside:
        records = beside.records(limit=limit)
        _print_records(records, as_json=as_json, with_header=True)
        while follow:
            threading.Event().wait(_FOLLOW_SECONDS)
            last = records[-1].sequence if records else 0
            newer = beside.records(after=last)
            _print_records(newer, as_json=as_json, with_header=False)
            records = newer or records


def _print_records(records: Sequence[TransitionRecord], *, as_json: bool, with_header: bool) -> None:
    if as_json:
        for record in records:
            click.echo(encode(record))
    elif records:
        header = ("SEQ", "OBSERVED", "TRANSITION", "EVIDENCE", "TYPE", "NOT BEFORE", "RESOURCES", "EVENT")
        print_table(header if with_header else (), [_record_cells(record) for record in records])
    elif with_header:
        click.echo("No transition has been recorded yet.", err=True)


def _record_cells(record: TransitionRecord) -> tuple[str, ...]:
    event = record.event
    return (
        str(record.sequence),
        f"{parse_time(record.observed_at):%Y-%m-%d %H:%M:%S}",
        record.transition.value,
        record.evidence.value,
        "" if event is None else event.event_type or "",
        "" if event is None or event.not_before is None else f"{event.not_before:%Y-%m-%d %H:%M:%S}",
        "" if event is None else ", ".join(event.resources or ()),
        "" if event is None else event.event_id or "",
    )


def list_deliveries(directory: Path, *, sink: str | None, state: str, limit: int, as_json: bool) -> None:
    """Print the rows in *state*: one state, ``owed`` (pending and parked) or ``all``."""
    states = {"owed": ("pending", "parked"), "all": (None,)}.get(state, (state,))
    with Beside(directory) as beside:
        rows = [row for one in states for row in beside.deliveries(sink=sink, state=one, limit=limit)]
    rows = sorted(rows, key=lambda row: (row.sink, row.sequence))[:limit]
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(row))
    elif rows:
        header = ("SINK", "SEQ", "STATE", "TRIES", "TRANSITION", "EVENT", "RECORD", "LAST ERROR")
        print_table(header, [_delivery_cells(row) for row in rows])
    else:
        click.echo("Nothing is owed." if state == "owed" else f"Nothing is {state}.", err=True)


def _delivery_cells(row: DeliveryRow) -> tuple[str, ...]:
    return (
        row.sink,
        str(row.sequence),
        row.state,
        str(row.attempts),
        row.record.transition.value,
        row.record.event_key,
        row.record.id,
        row.error or "",
    )


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns: with colours on a terminal, plain and whole when piped."""
    lines = [tuple(_plain(cell) for cell in row) for row in rows]
    every = [tuple(header), *lines] if header else lines
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    for number, line in enumerate(every):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        is_header = bool(header) and number == 0
        click.echo(click.style(text, bold=True) if is_header and _is_colourful() else text)


def _plain(cell: str) -> str:
    # A description or an error comes from elsewhere: it may not move the cursor.
    return "".join(character if character.isprintable() else " " for character in cell)


def _is_colourful() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
