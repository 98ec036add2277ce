"""Implements the `outbox list`, `retry`, `discard`, `move`, and `import` commands."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import click
import msgspec

from bridge.agent.control_requests import (
    PAGE_ROWS,
    discard_records,
    import_records,
    move_records,
    read_status,
    read_undelivered,
    retry_records,
)
from bridge.cli.connect import Reader, change
from bridge.cli.terminal import Table, counted, utc
from bridge.clock import format_time, parse_time
from bridge.errors import BridgeError
from bridge.outbox.rows import NEEDED, Delivery, DeliveryState

_FIELDS = ("sink", "sequence", "state", "attempts", "error", "changed_at", "record")
_HEADER = ("SINK", "SEQ", "STATE", "TRIES", "OBSERVED", "TRANSITION", "EVENT", "RECORD", "LAST ERROR")


def list_records(directory: Path, *, sink: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """Print the first *limit* undelivered records."""
    reader = Reader(directory)
    table = Table(_HEADER)
    left, after = limit, None
    while True:
        page = reader.ask(read_undelivered, sink=sink, states=_states(state), after=after, limit=min(left, PAGE_ROWS))
        left, after = left - len(page.rows), page.next_after
        if as_json:
            for row in page.rows:
                click.echo(msgspec.json.encode(_json(row)))
        else:
            table.add(map(_cells, page.rows))
        if after is None or not left:
            break
    if after is not None:
        click.echo(f"Only the first {counted(limit, 'record')} are listed. Use --limit to list more.", err=True)
    if left == limit and not as_json:
        click.echo(f"No {state or 'undelivered'} records.", err=True)


def _states(state: str | None) -> frozenset[DeliveryState]:
    return NEEDED if state is None else frozenset({DeliveryState(state)})


def _json(row: Delivery) -> dict[str, object]:
    changed_at = datetime.fromtimestamp(row.changed_at, timezone.utc)
    return {**{name: getattr(row, name) for name in _FIELDS}, "changed_at": format_time(changed_at)}


def _cells(row: Delivery) -> tuple[str, ...]:
    return (
        row.sink,
        str(row.sequence),
        row.state.value,
        str(row.attempts),
        utc(parse_time(row.record.observed_at)),
        row.record.transition.value,
        row.record.event_key,
        row.record.id,
        row.error or "",
    )


def retry(directory: Path, *, sink: str | None, record_id: str | None) -> None:
    """Make parked records pending, and send all pending records at once."""
    count = change(directory, retry_records, sink=sink, record_id=record_id)
    if record_id is not None and not count:
        raise _unknown_record(record_id, sink)
    parked = f", including {counted(count, 'parked record')}" if count else ". No record was parked"
    of = "" if sink is None else f" of {sink}"
    click.echo(
        f"All pending records{of} are scheduled for immediate delivery{parked}. `status` shows the result.", err=True
    )


def discard(directory: Path, *, sink: str, record_id: str | None, state: str | None, yes: bool) -> None:
    """Discard undelivered records of *sink*."""
    states, reader = _states(state), Reader(directory)
    found = reader.ask(read_undelivered, sink=sink, states=states, record_id=record_id, limit=1).rows
    if record_id is not None and not found:
        raise _unknown_record(record_id, sink)
    if found and not yes:
        row = reader.ask(read_status).totals.sinks[sink]
        number = 1 if record_id is not None else sum(getattr(row, each.value) for each in states)
        click.confirm(
            f"Discard {counted(number, 'record')} of sink {sink}, the oldest observed at "
            f"{utc(parse_time(found[0].record.observed_at))}? Discarded records are never sent.",
            abort=True,
            err=True,
        )
    count = change(directory, discard_records, sink=sink, states=states, record_id=record_id)
    click.echo(f"{counted(count, 'record')} discarded.", err=True)


def move(directory: Path, old: str, new: str) -> None:
    """Move the undelivered records of the sink *old* to *new*."""
    before = Reader(directory).ask(read_status).totals.sinks.get(old)
    count = change(directory, move_records, old=old, new=new)
    known = 0 if before is None else before.pending + before.parked - count
    already = f" Already in {new}: {counted(known, 'record')}." if known > 0 else ""
    click.echo(f"{counted(count, 'record')} moved from {old} to {new}.{already}", err=True)


def import_file(directory: Path, file: Path) -> None:
    """Import the undelivered records and holds from another outbox *file*."""
    count = change(directory, import_records, path=str(file.absolute()))
    click.echo(f"{counted(count, 'record')} imported.", err=True)


def _unknown_record(record_id: str, sink: str | None) -> BridgeError:
    where = "" if sink is None else f" for sink {sink}"
    return BridgeError(f"Unknown record {record_id}{where}. `outbox list` lists parked and pending records.")
