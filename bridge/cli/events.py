"""`events`: the transition records of this VM, as a table for a person or as JSON lines for a program."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import click

from bridge.cli.terminal import Table, utc
from bridge.clock import parse_time
from bridge.events.event import encode
from bridge.events.record import TransitionRecord
from bridge.health.client import EVENTS_UNKNOWN
from bridge.outbox.reader import OutboxFile

_FOLLOW_SECONDS = 0.5
_HEADER = ("SEQ", "OBSERVED", "TRANSITION", "EVIDENCE", "TYPE", "NOT BEFORE", "RESOURCES", "EVENT")
#: Wide enough for every word of ours and every time, so that what `--follow` adds stays under the header.
_WIDTHS = (5, 20, 16, 8, 9, 20)


def list_events(directory: Path, *, limit: int, follow: bool, as_json: bool) -> None:
    """Print the newest *limit* records, oldest first, then new ones as they come when *follow*."""
    table = Table(_HEADER, widths=_WIDTHS)
    with OutboxFile(directory) as outbox:
        records = outbox.records(limit=limit)
        is_stale = outbox.is_agent_in_memory
        if is_stale:
            _warn_of_memory(records)
        elif not records and not as_json:
            click.echo("No transition has been recorded yet.", err=True)
        _print_records(records, None if as_json else table)
        while follow:
            threading.Event().wait(_FOLLOW_SECONDS)
            last = records[-1].sequence if records else 0
            newer = outbox.records(after=last)
            _print_records(newer, None if as_json else table)
            records = newer or records
            was_stale, is_stale = is_stale, outbox.is_agent_in_memory
            if is_stale and not was_stale:
                _warn_of_memory(records)


def _warn_of_memory(records: Sequence[TransitionRecord]) -> None:
    """Warn that the agent has newer records than those that can be read here."""
    message = (
        "Newer records are in memory only: the agent works from memory because its disk refuses. They are written "
        "once it takes writes again; its /metrics has active_events."
    )
    click.echo(message if records else EVENTS_UNKNOWN, err=True)


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
