"""What `scheduled-events-bridge portal` and its commands do; `bridge.cli.portal` has their options, and prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from bridge.errors import BridgeError
from bridge.events.event import compact_json
from bridge.portal.audit import Entry, Fault, first_fault
from bridge.portal.serve import Portal
from bridge.portal.settings import database_file, find, load
from bridge.portal.store.audit import all_entries, count
from bridge.portal.store.database import Store, back_up

_COLUMNS = tuple(Entry.__struct_fields__)


class Verified(NamedTuple):
    """What `audit verify` found."""

    entries: int
    last_hash: str
    fault: Fault | None


def serve(config: Path | None) -> None:
    """Serve by the file *config* until a signal stops it."""
    Portal(load(find(config))).run()


def migrate(config: Path | None) -> tuple[str | None, str]:
    """Bring the database to this version; return the steps before and now."""
    store = _store(config, must_exist=False)
    try:
        return store.migrate()
    finally:
        store.close()


def backup(config: Path | None, target: Path) -> None:
    """Copy the database to *target*, also while the portal runs."""
    back_up(database_file(load(find(config))), target)


def verify(config: Path | None) -> Verified:
    """Look at every entry of the audit and return what was found."""
    store = _store(config)
    last = ""

    def walked(entries: Iterator[Entry]) -> Iterator[Entry]:
        nonlocal last
        for entry in entries:
            last = entry.hash
            yield entry

    try:
        total = store.read(count)
        fault = store.read(lambda connection: first_fault(walked(all_entries(connection)), count=total))
    finally:
        store.close()
    return Verified(total, last, fault)


def export(config: Path | None, form: str) -> Iterator[str]:
    """Yield every entry of the audit as a line, of JSON or of CSV, a page in memory at a time."""
    store = _store(config)
    try:
        with store.engine.connect() as connection:
            if form == "csv":
                yield _csv_line(_COLUMNS)
            for entry in all_entries(connection):
                yield _csv_line(_cells(entry)) if form == "csv" else msgspec.json.encode(entry).decode()
    finally:
        store.close()


def _cells(entry: Entry) -> tuple[str, ...]:
    values = msgspec.structs.asdict(entry)
    return tuple(compact_json(value) if isinstance(value, dict) else _harmless(str(value)) for value in values.values())


def _harmless(text: str) -> str:
    """Return *text* so that a spreadsheet takes it for no formula (OWASP, CSV injection)."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _csv_line(cells: tuple[str, ...]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()


def _store(config: Path | None, *, must_exist: bool = True) -> Store:
    path = database_file(load(find(config)))
    if must_exist and not path.exists():
        raise BridgeError(f"There is no database at {path}. It is made by the first start, or by `portal migrate`.")
    return Store.of_file(path)
