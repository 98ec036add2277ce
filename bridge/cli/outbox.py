"""`outbox list`, `outbox retry` and `outbox discard`: the records that sinks have not got, seen and changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from bridge.cli.terminal import Table, utc
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


def retry(directory: Path, *, sink: str | None, record_id: str | None) -> None:
    """Have parked records tried again, and what is pending at once; say how many there are of each."""
    with OutboxFile(directory) as outbox:
        _require_sink(outbox.accounts(), sink)
        count = outbox.retry(sink=sink, record_id=record_id)
        pending = sum(account.pending for name, account in outbox.accounts().items() if sink in (None, name)) - count
    click.echo(f"{count} parked {_records(count)} will be tried again.", err=True)
    if pending:
        click.echo(f"{pending} pending {_records(pending)} as well, at once: a sink that was paused goes on.", err=True)


def discard(directory: Path, *, sink: str, record_id: str | None, state: str | None, yes: bool) -> None:
    """Give up on records of *sink* after asking, unless *yes*; say how many."""
    what = f"record {record_id}" if record_id else f"every {state or 'pending and parked'} record"
    if not yes:
        click.confirm(f"Discard {what} of {sink}? It is never sent.", abort=True, err=True)
    with OutboxFile(directory) as outbox:
        _require_sink(outbox.accounts(), sink)
        count = outbox.discard(sink, state=state, record_id=record_id)
    click.echo(f"{count} {_records(count)} discarded.", err=True)


def _require_sink(known: Mapping[str, object], sink: str | None) -> None:
    if sink is not None and sink not in known:
        raise BridgeError(f"The outbox knows no sink called {sink!r}. It knows: {', '.join(known) or 'none'}.")


def _records(count: int) -> str:
    return "record" if count == 1 else "records"
