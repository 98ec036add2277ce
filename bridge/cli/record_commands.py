"""What the commands that end by themselves do and print: tables for a person, JSON lines for a program."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import click
import msgspec

from bridge.cli.command_words import utc
from bridge.cli.terminal import Table
from bridge.clock import format_time, parse_time, utc_now
from bridge.config.loader import Settings, SinkSettings
from bridge.delivery.sender import Sender
from bridge.errors import BridgeError
from bridge.events.event import ScheduledEvent, VmIdentity, encode
from bridge.events.record import Evidence, Transition, TransitionRecord, record_id, transition_key
from bridge.health.probe import EVENTS_UNKNOWN
from bridge.imds.client import client_of
from bridge.outbox.reader import DeliveryRow, OutboxFile
from bridge.polling.identity import merged

_FOLLOW_SECONDS = 0.5
_IDENTITY_SECONDS = 2.0
_EVENT_HEADER = ("SEQ", "OBSERVED", "TRANSITION", "EVIDENCE", "TYPE", "NOT BEFORE", "RESOURCES", "EVENT")
#: Wide enough for every word of ours and every time, so that what `--follow` adds stays under the header.
_EVENT_WIDTHS = (5, 20, 16, 8, 9, 20)
_DELIVERY_HEADER = (
    "SINK",
    "SEQ",
    "STATE",
    "TRIES",
    "OBSERVED",
    "CHANGED",
    "TRANSITION",
    "EVENT",
    "RECORD",
    "LAST ERROR",
)
Result = tuple[str, "str | None"]
"""A destination's name, and what is wrong with it, null when nothing is."""


def _problem_of(sink: SinkSettings, record: TransitionRecord) -> str | None:
    """Send *record* to *sink*; return what was wrong."""
    sender = Sender(sink.build, name=sink.name, timeout_seconds=sink.config.timeout_seconds)
    try:
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
    table = Table(_EVENT_HEADER, widths=_EVENT_WIDTHS)
    with OutboxFile(directory) as beside:
        records = beside.records(limit=limit)
        is_stale = beside.is_stale
        if is_stale:
            _warn_of_memory(records)
        elif not records and not as_json:
            click.echo("No transition has been recorded yet.", err=True)
        _print_records(records, None if as_json else table)
        while follow:
            threading.Event().wait(_FOLLOW_SECONDS)
            last = records[-1].sequence if records else 0
            newer = beside.records(after=last)
            _print_records(newer, None if as_json else table)
            records = newer or records
            was_stale, is_stale = is_stale, beside.is_stale
            if is_stale and not was_stale:
                _warn_of_memory(records)


def _warn_of_memory(records: Sequence[TransitionRecord]) -> None:
    """Say that the agent knows more than the *records* that can be read here."""
    said = (
        "Newer records are in memory only: the agent works from memory because its disk refuses. They are written "
        "once it takes writes again; its /metrics has active_events."
    )
    click.echo(said if records else EVENTS_UNKNOWN, err=True)


def _print_records(records: Sequence[TransitionRecord], table: Table | None) -> None:
    if table is not None:
        table.add(map(_record_cells, records))
        return
    for record in records:
        click.echo(encode(record))


def _record_cells(record: TransitionRecord) -> tuple[str, ...]:
    event = record.event
    return (
        str(record.sequence),
        utc(parse_time(record.observed_at)),
        record.transition.value,
        record.evidence.value,
        "" if event is None else event.event_type or "",
        "" if event is None or event.not_before is None else utc(event.not_before),
        "" if event is None else ", ".join(event.resources or ()),
        "" if event is None else event.event_id or "",
    )


def list_deliveries(directory: Path, *, sink: str | None, state: str, limit: int, as_json: bool) -> None:
    """Print the rows in *state*: one state, ``owed`` (pending and parked) or ``all``."""
    states = {"owed": ("pending", "parked"), "all": (None,)}.get(state, (state,))
    with OutboxFile(directory) as beside:
        rows = [row for one in states for row in beside.deliveries(sink=sink, state=one, limit=limit)]
        is_stale = beside.is_stale
    if is_stale:
        click.echo(
            "What happened since its disk refuses is not known here: the agent works from memory. `status` asks it.",
            err=True,
        )
    rows = sorted(rows, key=lambda row: (row.sink, row.sequence))[:limit]
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(row))
    elif rows:
        Table(_DELIVERY_HEADER).add(map(_delivery_cells, rows))
    elif not is_stale:
        click.echo("Nothing is owed." if state == "owed" else f"Nothing is {state}.", err=True)


def _delivery_cells(row: DeliveryRow) -> tuple[str, ...]:
    return (
        row.sink,
        str(row.sequence),
        row.state,
        str(row.attempts),
        utc(parse_time(row.record.observed_at)),
        utc(parse_time(row.changed_at)),
        row.record.transition.value,
        row.record.event_key,
        row.record.id,
        row.error or "",
    )
