"""`outbox list`, `outbox retry` and `outbox discard`: the records that sinks have not got, seen and changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from bridge.cli.terminal import Table, counted, is_narrower_than, utc
from bridge.clock import parse_time
from bridge.errors import BridgeError
from bridge.outbox.reader import DeliveryRow, OutboxFile

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


#: On a terminal that is narrower than a row with its ids, each row is followed by lines of its own.
_WIDE = 180
_NARROW_HEADER = ("SINK", "SEQ", "STATE", "TRIES", "OBSERVED", "TRANSITION")


def list_deliveries(directory: Path, *, sink: str | None, state: str, limit: int, as_json: bool) -> None:
    """Print the rows in *state*: one state, ``owed`` (pending and parked) or ``all``."""
    states = {"owed": ("pending", "parked"), "all": (None,)}.get(state, (state,))
    with OutboxFile(directory) as outbox:
        rows = [row for one in states for row in outbox.deliveries(sink=sink, state=one, limit=limit)]
        is_stale = outbox.is_agent_in_memory
    if is_stale:
        click.echo(
            "What happened since its disk refuses is not known here: the agent works from memory. `status` asks it.",
            err=True,
        )
    rows = sorted(rows, key=lambda row: (row.sink, row.sequence))[:limit]
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(row))
    elif rows and is_narrower_than(_WIDE):
        Table(_NARROW_HEADER).add_with(map(_narrow_cells, map(_delivery_cells, rows)))
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


def _narrow_cells(cells: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Return the *cells* that fit into 80 columns, and lines with the others for below them."""
    sink, sequence, state, tries, observed, changed, transition, event, record, error = cells
    below = [f"event {event}", f"record {record}, changed {changed}", error]
    return (sink, sequence, state, tries, observed, transition), [line for line in below if line]


def retry(directory: Path, *, sink: str | None, record_id: str | None) -> None:
    """Have parked records tried again, and what is pending at once; say how many there are of each.

    Raises BridgeError when nobody is owed a record with *record_id*: then nothing is touched.
    """
    with OutboxFile(directory) as outbox:
        _require_sink(outbox.accounts(), sink)
        if record_id is not None:
            _require_record(_owed(outbox, sink, None, record_id), record_id, sink)
        count = outbox.retry(sink=sink, record_id=record_id)
        pending = sum(account.pending for name, account in outbox.accounts().items() if sink in (None, name)) - count
    click.echo(f"{counted(count, 'parked record')} will be tried again.", err=True)
    if pending:
        click.echo(f"{counted(pending, 'pending record')} as well, at once: a sink that was paused goes on.", err=True)


def discard(directory: Path, *, sink: str, record_id: str | None, state: str | None, yes: bool) -> None:
    """Give up on records of *sink* after saying how many, of when, and asking, unless *yes*.

    Raises BridgeError when the sink is owed no record with *record_id*.
    """
    with OutboxFile(directory) as outbox:
        _require_sink(outbox.accounts(), sink)
        rows = _owed(outbox, sink, state, record_id)
        if record_id is not None:
            _require_record(rows, record_id, sink)
        if rows and not yes:
            times = sorted(utc(parse_time(row.record.observed_at)) for row in rows)
            when = f"observed {times[0]}" + ("" if times[0] == times[-1] else f" to {times[-1]}")
            what = counted(len(rows), f"{state} record" if state else "record")
            click.confirm(
                f"Discard {what} of {sink}, {when}? {'It is' if len(rows) == 1 else 'They are'} never sent.",
                abort=True,
                err=True,
            )
        count = outbox.discard(sink, state=state, record_id=record_id) if rows else 0
    click.echo(f"{counted(count, 'record')} discarded.", err=True)


def _owed(outbox: OutboxFile, sink: str | None, state: str | None, record_id: str | None) -> list[DeliveryRow]:
    """Return the rows of *sink* (None: of every sink) in *state* (None: pending or parked), of one record or all."""
    states = (state,) if state else ("pending", "parked")
    rows = [row for each in states for row in outbox.deliveries(sink=sink, state=each)]
    return [row for row in rows if record_id in (None, row.record.id)]


def _require_record(rows: Sequence[DeliveryRow], record_id: str, sink: str | None) -> None:
    if not rows:
        raise BridgeError(
            f"{'No sink is' if sink is None else f'Sink {sink} is not'} owed the record {record_id}. "
            "`outbox list` shows what is owed."
        )


def _require_sink(known: Mapping[str, object], sink: str | None) -> None:
    if sink is not None and sink not in known:
        raise BridgeError(f"The outbox knows no sink called {sink!r}. It knows: {', '.join(known) or 'none'}.")
