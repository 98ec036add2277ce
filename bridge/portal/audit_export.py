"""Exports audit entries as lines of JSON or CSV, oldest first."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Iterable, Mapping

import msgspec
from starlette.responses import Response, StreamingResponse

from bridge.events.event import compact_json
from bridge.portal.audit import Entry
from bridge.portal.store.audit import AuditFilter, entries
from bridge.portal.store.database import StoreThreads

#: The formats, and their media types.
FORMATS = {"jsonl": "application/jsonl", "csv": "text/csv; charset=utf-8"}


async def streamed(store: StoreThreads, wanted: AuditFilter, form: str, headers: Mapping[str, str]) -> Response:
    """Return the entries of *wanted*. Load one page of entries at a time."""
    first = await store.read(entries, wanted, after=0)

    async def chunks() -> AsyncIterator[str]:
        page = first
        yield header(form)
        while page:
            yield lines(page, form)
            page = await store.read(entries, wanted, after=page[-1].entry)

    return StreamingResponse(chunks(), media_type=FORMATS[form], headers=headers)


def header(form: str) -> str:
    """Return the text before the first entry."""
    return _csv([Entry.__struct_fields__]) if form == "csv" else ""


def lines(page: Iterable[Entry], form: str) -> str:
    """Return a line for each entry."""
    if form == "csv":
        return _csv(map(_cells, page))
    return "".join(f"{msgspec.json.encode(entry).decode()}\n" for entry in page)


def _csv(rows: Iterable[Iterable[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _cells(entry: Entry) -> tuple[str, ...]:
    values = msgspec.structs.astuple(entry)
    return tuple(compact_json(value) if isinstance(value, dict) else _harmless(str(value)) for value in values)


def _harmless(text: str) -> str:
    """Escape *text* to prevent spreadsheet formula injection (OWASP: CSV injection)."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
