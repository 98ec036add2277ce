"""`events`: the transition records of this VM, as a table or as JSON lines."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
import msgspec

from bridge.agent.requests import Asked, Events
from bridge.cli.connect import Reader
from bridge.cli.stderr import say
from bridge.cli.terminal import Table, utc
from bridge.clock import parse_time
from bridge.errors import BridgeError
from bridge.events.event import encode
from bridge.events.record import TransitionRecord

_FOLLOW_SECONDS = 0.5
_NO_LIMIT = 1_000_000
_HEADER = ("SEQ", "OBSERVED", "TRANSITION", "EVIDENCE", "TYPE", "NOT BEFORE", "EVENT", "RESOURCES")
#: Wide enough for all transitions and times, so that the rows of `--follow` stay aligned.
_WIDTHS = (5, 20, 16, 8, 9, 20, 36)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def since(text: str, now: datetime) -> datetime:
    """Return *text* as a time: a duration before *now*, such as 90s, 30m, 1h, or 2d, or an ISO 8601 time.

    A time without an offset is in UTC. Raises ValueError.
    """
    span = _SPAN.fullmatch(text)
    try:
        if span:
            return now - timedelta(seconds=float(span[1]) * _SECONDS[span[2]])
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is neither a duration, such as 90s, 30m, 1h, or 2d, nor a time, such as 2026-11-20T11:00Z."
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def list_events(directory: Path, wanted: Events, *, follow: bool, as_json: bool) -> None:
    """Print the newest records that match *wanted*, oldest first, and with *follow* also each new record."""
    table = None if as_json else Table(_HEADER, widths=_WIDTHS)
    asked = Reader(directory)
    # Read first, so that records between the two requests are printed as well.
    last = _last_sequence(asked) if follow else 0
    records = [*_newest_first(asked, wanted)][::-1]
    if not records and not as_json:
        is_filtered = wanted != Events(limit=wanted.limit)
        click.echo("No matching records." if is_filtered else "No records yet.", err=True)
    _print(records, table)
    last = max([last, *(record.sequence for record in records)])
    problem = ""
    while follow:
        threading.Event().wait(_FOLLOW_SECONDS)
        try:
            newer = [*_newest_first(asked, Events(after=last, limit=_NO_LIMIT))][::-1]
        except BridgeError as error:  # for example, while the agent restarts
            if str(error) != problem:
                say(str(error))
            problem = str(error)
            continue
        problem = ""
        last = max([last, *(record.sequence for record in newer)])
        _print(filter(wanted.matches, newer), table)


def _last_sequence(asked: Asked) -> int:
    return max((record.sequence for record in asked.ask(Events(limit=1)).records), default=0)


def _newest_first(asked: Asked, wanted: Events) -> Iterator[TransitionRecord]:
    """Yield the newest records that match, page by page."""
    left, before = wanted.limit, wanted.before
    while left > 0:
        page = asked.ask(msgspec.structs.replace(wanted, limit=left, before=before))
        yield from page.records
        left -= len(page.records)
        before = page.next_before
        if before is None:
            return


def _print(records: Iterable[TransitionRecord], table: Table | None) -> None:
    if table is None:
        for record in records:
            click.echo(encode(record))
    else:
        table.add(map(_cells, records))


def _cells(record: TransitionRecord) -> tuple[str, ...]:
    event = record.event
    return (
        str(record.sequence),
        utc(parse_time(record.observed_at)),
        record.transition.value,
        record.evidence.value,
        "" if event is None else event.event_type or "",
        "" if event is None or event.not_before is None else utc(event.not_before),
        "" if event is None else event.event_id or "",
        "" if event is None else ", ".join(event.resources or ()),
    )
