"""What `scheduled-events-bridge portal` and its commands do; `bridge.cli.portal` has their options, and prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from bridge.clock import REAL_CLOCK, format_time
from bridge.errors import BridgeError
from bridge.events.event import compact_json
from bridge.portal.audit import Entry, Fault, NewEntry, first_fault
from bridge.portal.migrations import current
from bridge.portal.serve import Portal
from bridge.portal.settings import database_file, find, load
from bridge.portal.store.audit import add_entries, all_entries, count, entries
from bridge.portal.store.database import Store
from bridge.portal.store.users import User, all_users
from bridge.portal.store.users import add_user as store_user
from bridge.portal.store.users import change_user as store_change
from bridge.portal.user_names import MOST_CHARACTERS, user_name_in
from bridge.portal.users import Role, hashed

SHORTEST_PASSWORD = 12
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
    store = _store(config)
    try:
        store.kind.back_up(target)
    finally:
        store.close()


def verify(config: Path | None) -> Verified:
    """Look at every entry of the audit and return what was found."""
    store = _store(config)
    last = ""

    def walked(chain: Iterator[Entry]) -> Iterator[Entry]:
        nonlocal last
        for entry in chain:
            last = entry.hash
            yield entry

    try:
        total = store.read(count)
        fault = store.read(lambda connection: first_fault(walked(all_entries(connection)), count=total))
    finally:
        store.close()
    return Verified(total, last, fault)


def add_user(config: Path | None, name: str, *, password: str | None, role: str, scope: Sequence[str]) -> None:
    """Let somebody in, or replace who it is; without *password* only a proxy does."""
    known = user_name_in(name)
    if known is None:
        raise BridgeError(f"{name[:MOST_CHARACTERS]!r} is no name: at most {MOST_CHARACTERS} characters that are seen.")
    user = User(
        user_name=known,
        password_hash=_hash_of(password),
        role=Role(role).value,
        scope=_scopes(scope),
        made_at=format_time(REAL_CLOCK.now()),
    )
    details = {"role": user.role, "scope": list(user.scopes)}
    _write(config, "user_added", details, lambda connection: store_user(connection, user), name=known)


def change_user(config: Path | None, name: str, *, role: str | None = None, scope: Sequence[str] | None = None) -> User:
    """Change what somebody may do, and where; None: as it is. Return who it is now."""
    changes = {} if role is None else {"role": Role(role).value}
    changes |= {} if scope is None else {"scope": _scopes(scope)}
    if not changes:
        raise BridgeError("Say what is to change: --role, --scope or --all-vms.")
    details: dict[str, object] = {**changes}
    if "scope" in changes:
        details["scope"] = changes["scope"].splitlines()
    return _change(config, "user_changed", name, details, **changes)


def set_password(config: Path | None, name: str, password: str | None) -> User:
    """Give somebody another password; None: only a proxy lets them in from now on."""
    details = {"by": "proxy" if password is None else "password"}
    return _change(config, "user_password_changed", name, details, password_hash=_hash_of(password))


def disable_user(config: Path | None, name: str) -> User:
    """Let somebody in no more."""
    return _change(config, "user_disabled", name, {}, disabled_at=format_time(REAL_CLOCK.now()))


def enable_user(config: Path | None, name: str) -> User:
    """Let somebody in again."""
    return _change(config, "user_enabled", name, {}, disabled_at=None)


def sign_out_user(config: Path | None, name: str) -> User:
    """End the sessions of somebody, who may sign in again."""
    return _change(config, "user_signed_out", name, {})


def list_users(config: Path | None) -> list[User]:
    """Return everybody who has a name here."""
    store = _store(config)
    try:
        return store.read(all_users)
    finally:
        store.close()


def _change(config: Path | None, action: str, name: str, details: Mapping[str, object], **values: object) -> User:
    """Change *values* of somebody, whose sessions end by it; return who it is now."""
    return _write(config, action, details, lambda connection: store_change(connection, name, **values), name=name)


def _write(
    config: Path | None,
    action: str,
    details: Mapping[str, object],
    change: Callable[[Connection], User | None],
    *,
    name: str,
) -> User:
    """Do *change* and write that into the audit, in one transaction; return who it is now."""
    at = format_time(REAL_CLOCK.now())

    def both(connection: Connection) -> User:
        user = change(connection)
        if user is None:
            raise BridgeError(f"Nobody is called {name!r} here. `portal users list` names everybody.")
        entry = NewEntry(actor="portal users", action=action, subject=user.user_name, details=dict(details))
        add_entries(connection, [entry], at=at)
        return user

    store = _store(config, must_exist=False)
    try:
        store.migrate()
        return store.write(both)
    finally:
        store.close()


def _hash_of(password: str | None) -> str | None:
    if password is not None and len(password) < SHORTEST_PASSWORD:
        raise BridgeError(f"A password has at least {SHORTEST_PASSWORD} characters.")
    return None if password is None else hashed(password)


def _scopes(texts: Sequence[str]) -> str:
    return "\n".join(_scope(each) for each in texts)


def _scope(text: str) -> str:
    """Return *text* as an event's groups have it; raise BridgeError for what names no group."""
    kind, separator, value = text.partition(":")
    if not separator or not value or not (kind == "resource_group" or kind.removeprefix("labels.") not in {"", kind}):
        raise BridgeError(f"{text!r} is no scope. Give resource_group:NAME or labels.NAME:VALUE.")
    return text.casefold() if kind == "resource_group" else text


def export(config: Path | None, form: str) -> Iterator[str]:
    """Yield every entry of the audit as a line, of JSON or of CSV, a page in memory at a time.

    Each page is a transaction of its own: whoever reads slowly keeps nobody from writing, and no entry ever changes.
    """
    store = _store(config)
    try:
        if form == "csv":
            yield _csv_line(_COLUMNS)
        page = store.read(entries, after=0)
        while page:
            for entry in page:
                yield _csv_line(_cells(entry)) if form == "csv" else msgspec.json.encode(entry).decode()
            page = store.read(entries, after=page[-1].entry)
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
    settings = load(find(config))
    where = settings.database.url or database_file(settings)
    nothing = BridgeError(f"There is no database at {where}. It is made by the first start, or by `portal migrate`.")
    if must_exist and isinstance(where, Path) and not where.exists():
        raise nothing
    store = Store.of_settings(settings)
    try:
        if must_exist and store.read(current) is None:
            raise nothing
    except BridgeError:
        store.close()
        raise
    return store
