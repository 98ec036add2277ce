"""The commands of `scheduled-events-bridge portal`.

`bridge.cli.portal` defines their options.
"""

from __future__ import annotations

import contextlib
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
    """The result of `audit verify`."""

    entries: int
    last_hash: str
    fault: Fault | None


def serve(config: Path | None) -> None:
    """Run the portal until a signal stops it."""
    Portal(load(find(config))).run()


def migrate(config: Path | None) -> tuple[str | None, str]:
    """Migrate the database. Return the old and the new migration step."""
    with _opened(config, must_exist=False) as store:
        return store.migrate()


def backup(config: Path | None, target: Path) -> None:
    """Copy the database to *target*, even while the portal is running."""
    with _opened(config) as store:
        store.kind.back_up(target)


def verify(config: Path | None) -> Verified:
    """Check every entry of the audit."""
    with _opened(config) as store:
        total = store.read(count)
        fault = store.read(lambda connection: first_fault(all_entries(connection), count=total))
        last = store.read(entries, after=max(0, total - 1))
    return Verified(total, last[-1].hash if last else "", fault)


def add_user(config: Path | None, name: str, *, password: str | None, role: str, scope: Sequence[str]) -> None:
    """Add or replace a user. If *password* is None, the user can sign in only through a proxy."""
    known = user_name_in(name)
    if known is None:
        raise BridgeError(
            f"{name[:MOST_CHARACTERS]!r} is not a valid name. Use at most {MOST_CHARACTERS} visible characters."
        )
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
    """Update a user's role, scope, or both. Return the updated user."""
    changes = {} if role is None else {"role": Role(role).value}
    changes |= {} if scope is None else {"scope": _scopes(scope)}
    if not changes:
        raise BridgeError("Nothing to change. Use --role, --scope, or --all-vms.")
    details = {key: value.splitlines() if key == "scope" else value for key, value in changes.items()}
    return _change(config, "user_changed", name, details, **changes)


def set_password(config: Path | None, name: str, password: str | None) -> User:
    """Set or remove a user's password. Return the updated user."""
    details = {"by": "proxy" if password is None else "password"}
    return _change(config, "user_password_changed", name, details, password_hash=_hash_of(password))


def disable_user(config: Path | None, name: str) -> User:
    """Disable a user."""
    return _change(config, "user_disabled", name, {}, disabled_at=format_time(REAL_CLOCK.now()))


def enable_user(config: Path | None, name: str) -> User:
    """Enable a user."""
    return _change(config, "user_enabled", name, {}, disabled_at=None)


def sign_out_user(config: Path | None, name: str) -> User:
    """End the sessions of a user."""
    return _change(config, "user_signed_out", name, {})


def list_users(config: Path | None) -> list[User]:
    """Return all users."""
    with _opened(config) as store:
        return store.read(all_users)


def _change(config: Path | None, action: str, name: str, details: Mapping[str, object], **values: object) -> User:
    return _write(config, action, details, lambda connection: store_change(connection, name, **values), name=name)


def _write(
    config: Path | None,
    action: str,
    details: Mapping[str, object],
    change: Callable[[Connection], User | None],
    *,
    name: str,
) -> User:

    def both(connection: Connection) -> User:
        user = change(connection)
        if user is None:
            raise BridgeError(f"No user is called {name!r}. `portal users list` lists all users.")
        entry = NewEntry(actor="portal users", action=action, subject=user.user_name, details=dict(details))
        add_entries(connection, [entry], at=format_time(REAL_CLOCK.now()))
        return user

    with _opened(config, must_exist=False) as store:
        store.migrate()
        return store.write(both)


def _hash_of(password: str | None) -> str | None:
    if password is not None and len(password) < SHORTEST_PASSWORD:
        raise BridgeError(f"A password must have at least {SHORTEST_PASSWORD} characters.")
    return None if password is None else hashed(password)


def _scopes(texts: Sequence[str]) -> str:
    return "\n".join(_scope(each) for each in texts)


def _scope(text: str) -> str:
    kind, separator, value = text.partition(":")
    if not separator or not value or not (kind == "resource_group" or kind.removeprefix("labels.") not in {"", kind}):
        raise BridgeError(f"{text!r} is not a scope. Use resource_group:NAME or labels.NAME:VALUE.")
    return text.casefold() if kind == "resource_group" else text


def export(config: Path | None, form: str) -> Iterator[str]:
    """Yield every audit entry as a line of JSON or CSV."""
    with _opened(config) as store:
        if form == "csv":
            yield _csv_line(_COLUMNS)
        page = store.read(entries, after=0)
        while page:
            for entry in page:
                yield _csv_line(_cells(entry)) if form == "csv" else msgspec.json.encode(entry).decode()
            page = store.read(entries, after=page[-1].entry)


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


@contextlib.contextmanager
def _opened(config: Path | None, *, must_exist: bool = True) -> Iterator[Store]:
    settings = load(find(config))
    where = settings.database.url or database_file(settings)
    missing = BridgeError(f"No database exists at {where}. The first start or `portal migrate` creates it.")
    if must_exist and isinstance(where, Path) and not where.exists():
        raise missing
    with contextlib.closing(Store.of_settings(settings)) as store:
        if must_exist and store.read(current) is None:
            raise missing
        yield store
