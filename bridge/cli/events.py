"""Implements the `events` command, which lists the transition records of this VM."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click

from bridge.agent.control_requests import EVERY_RECORD, FIRST, LAST, RecordFilter, read_events
from bridge.cli.connect import Reader
from bridge.cli.terminal import Table, say, utc
from bridge.clock import parse_time, utc_now
from bridge.errors import BridgeError
from bridge.events.event import check_spelling, encode
from bridge.events.record import TransitionRecord

_FOLLOW_SECONDS = 0.5
_NO_LIMIT = 1_000_000
_HEADER = ("SEQ", "OBSERVED", "TRANSITION", "EVIDENCE", "TYPE", "NOT BEFORE", "EVENT", "RESOURCES")
#: Wide enough for all transitions and times, so that the rows of `--follow` stay aligned.
_WIDTHS = (5, 20, 16, 8, 9, 20, 36)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def moment(text: str, now: datetime) -> datetime:
    """Return the time in *text*: ISO 8601, or a duration before *now*, such as 90s or 2d.

    A time without an offset is in UTC. Raises ValueError if *text* is invalid.
    """
    span = _SPAN.fullmatch(text)
    try:
        if span:
            return now - timedelta(seconds=float(span[1]) * _SECONDS[span[2]])
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is neither a duration, such as 90s, 30m, 1h, or 2d, nor a time, such as 2026-11-20T11:00Z."
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def list_events(
    directory: Path,
    *,
    limit: int,
    since: str | None,
    event_id: str | None,
    event_types: tuple[str, ...],
    follow: bool,
    as_json: bool,
) -> None:
    """Print the records that match the options."""
    try:
        begin = moment(since, utc_now()).timestamp() if since else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None
    for each in event_types:
        try:
            check_spelling(each)
        except ValueError as error:
            raise click.BadParameter(f"Use {error}.", param_hint="--type") from None
    wanted = RecordFilter(since=begin, event_id=event_id, event_types=event_types)
    print_events(directory, wanted, limit=limit, follow=follow, as_json=as_json)


def print_events(directory: Path, wanted: RecordFilter, *, limit: int, follow: bool, as_json: bool) -> None:
    """Print the newest *limit* records that match, oldest first."""
    table = None if as_json else Table(_HEADER, widths=_WIDTHS)
    reader = Reader(directory)
    records = _records(reader, wanted, limit=limit)
    if not records and not as_json:
        click.echo("No records yet." if wanted == EVERY_RECORD else "No matching records.", err=True)
    _print(records, table)
    problem, last = "", FIRST
    while follow:
        last = records[-1].sequence if records else last
        threading.Event().wait(_FOLLOW_SECONDS)
        try:
            records = _records(reader, wanted, after=last)
        except BridgeError as error:  # for example, while the agent restarts
            if str(error) != problem:
                say(str(error))
            problem = str(error)
            continue
        problem = ""
        _print(records, table)


def _records(
    reader: Reader, wanted: RecordFilter, *, after: int = FIRST, limit: int = _NO_LIMIT
) -> list[TransitionRecord]:
    records: list[TransitionRecord] = []
    before = LAST
    while limit > len(records):
        page = reader.ask(read_events, wanted=wanted, after=after, before=before, limit=limit - len(records))
        records += page.records
        if page.next_before is None:
            break
        before = page.next_before
    return records[::-1]


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
