"""`events`: the transition records of this VM, as a table for a person or as JSON lines for a program."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import click

from bridge.cli.terminal import Table, is_narrower_than, utc
from bridge.clock import parse_time
from bridge.events.event import encode
from bridge.events.record import Evidence, TransitionRecord
from bridge.health.client import EVENTS_UNKNOWN
from bridge.outbox.reader import OutboxFile

_FOLLOW_SECONDS = 0.5
_NONE_YET = "No transition has been recorded yet."
_HEADER = ("SEQ", "OBSERVED", "TRANSITION", "EVIDENCE", "TYPE", "NOT BEFORE", "RESOURCES", "EVENT")
#: Wide enough for every word of ours and every time, so that what `--follow` adds stays under the header.
_WIDTHS = (5, 20, 16, 8, 9, 20)
#: On a terminal that is narrower than a row with an EventId and a name or two, each record takes two lines.
_WIDE = 150
_NARROW_HEADER = ("SEQ", "OBSERVED", "TRANSITION", "TYPE", "NOT BEFORE")
_NARROW_WIDTHS = (5, 20, 16, 9)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Wanted(NamedTuple):
    """Which records to list."""

    since: datetime | None = None
    """Only those observed then or later."""
    event_id: str | None = None
    """Only those of the event with this EventId, in any case."""
    event_types: frozenset[str] = frozenset()
    """Only those of events of these types; none: of any."""

    def takes(self, record: TransitionRecord) -> bool:
        """Return whether *record* is one of them."""
        if self.since is not None and parse_time(record.observed_at) < self.since:
            return False
        event_id, event_type = (record.event.event_id, record.event.event_type) if record.event else (None, None)
        if self.event_id is not None and (event_id or "").casefold() != self.event_id.casefold():
            return False
        return not self.event_types or event_type in self.event_types


def since(text: str, now: datetime) -> datetime:
    """Return the time that *text* means: a span before *now*, such as ``90s``, ``30m``, ``1h`` or ``2d``, or a time.

    A time is ISO 8601, in UTC unless it says otherwise. Raises ValueError for anything else.
    """
    span = _SPAN.fullmatch(text)
    try:
        if span:
            return now - timedelta(seconds=float(span[1]) * _SECONDS[span[2]])
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no span such as 90s, 30m, 1h or 2d, and no time such as 2026-11-20T11:00Z."
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def list_events(
    directory: Path,
    *,
    limit: int,
    follow: bool,
    as_json: bool,
    wanted: Wanted = Wanted(),  # noqa: B008  # frozen
) -> None:
    """Print the newest *limit* records that are *wanted*, oldest first, then new ones as they come when *follow*."""
    is_narrow = is_narrower_than(_WIDE)
    table = Table(_NARROW_HEADER, widths=_NARROW_WIDTHS) if is_narrow else Table(_HEADER, widths=_WIDTHS)
    with OutboxFile(directory) as outbox:
        last = outbox.last_sequence() if follow else 0  # before they are read: what comes between is not missed
        records = outbox.records(limit=limit, wanted=wanted.takes)
        is_stale = outbox.is_agent_in_memory
        if is_stale:
            _warn_of_memory(records)
        elif not records and not as_json:
            click.echo(_NONE_YET if wanted == Wanted() else "No record is as asked for.", err=True)
        _print_records(records, None if as_json else table, is_narrow=is_narrow)
        last = max([last, *(record.sequence for record in records)])
        while follow:
            threading.Event().wait(_FOLLOW_SECONDS)
            newer = outbox.records(after=last)
            last = newer[-1].sequence if newer else last
            newer = [record for record in newer if wanted.takes(record)]
            _print_records(newer, None if as_json else table, is_narrow=is_narrow)
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


def _print_records(records: Sequence[TransitionRecord], table: Table | None, *, is_narrow: bool) -> None:
    if table is None:
        for record in records:
            click.echo(encode(record))
    elif is_narrow:
        table.add_with(map(_narrow_cells, map(_record_cells, records)))
    else:
        table.add(map(_record_cells, records))


def _narrow_cells(cells: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Return the *cells* that fit into 80 columns, and a line with the others for below them."""
    sequence, observed, transition, evidence, event_type, not_before, resources, event_id = cells
    sure = "" if evidence == Evidence.OBSERVED.value else f"({evidence})"
    below = "  ".join(filter(None, (event_id, resources, sure)))
    return (sequence, observed, transition, event_type, not_before), [below] if below else []


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
