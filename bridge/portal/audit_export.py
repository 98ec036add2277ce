"""Writes audit entries as lines of JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

import msgspec

from bridge.events.event import compact_json
from bridge.portal.audit import Entry

#: The formats, and their media types.
FORMATS = {"jsonl": "application/jsonl", "csv": "text/csv; charset=utf-8"}


def header(form: str) -> list[str]:
    """Return the lines before the first entry."""
    return [_csv_line(Entry.__struct_fields__)] if form == "csv" else []


def lines(entries: Iterable[Entry], form: str) -> Iterator[str]:
    """Yield a line for each entry, without the line end."""
    for entry in entries:
        yield _csv_line(_cells(entry)) if form == "csv" else msgspec.json.encode(entry).decode()


def _cells(entry: Entry) -> tuple[str, ...]:
    values = msgspec.structs.asdict(entry)
    return tuple(compact_json(value) if isinstance(value, dict) else _harmless(str(value)) for value in values.values())


def _harmless(text: str) -> str:
    """Escape *text* to prevent spreadsheet formula injection (OWASP: CSV injection)."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _csv_line(cells: tuple[str, ...]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()
