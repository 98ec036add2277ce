"""The commands of `scheduled-events-bridge portal`.

`bridge.cli.portal` defines their options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from argon2 import PasswordHasher
from sqlalchemy import Connection

from bridge.clock import REAL_CLOCK, format_time
from bridge.errors import BridgeError
from bridge.portal.audit import Entry, Fault, first_fault
from bridge.portal.audit_export import header, lines
from bridge.portal.check_config import new_database, problems
from bridge.portal.grants import Grant, Role, scope_group
from bridge.portal.migrations import current
from bridge.portal.serve import Portal
from bridge.portal.settings import database_file, load
from bridge.portal.store.audit import add_entries, all_entries, count, entries, entry_with_hash
from bridge.portal.store.database import Store
from bridge.portal.store.users import User, all_users, find_user, put_user
from bridge.portal.user_names import LOCAL, MOST_CHARACTERS, issuer_of, local_key, user_name_in

SHORTEST_PASSWORD = 12


class Verified(NamedTuple):
    """The result of `audit verify`."""

    entries: int
    last_hash: str
    fault: Fault | None
    expected_entry: int | None
    """The entry with the expected hash, or None if no entry has this hash."""


def serve(config: Path | None) -> None:
    """Run the portal until a signal stops it."""
    Portal(load(config)).run()


def check_config(config: Path | None, *, connect: bool) -> tuple[list[str], Path | None]:
    """Return a sentence for each problem, and the database that the portal will create.

    Raise ConfigurationError if the file is invalid.
    """
    settings = load(config)
    return list(problems(settings, connect=connect)), new_database(settings)


def migrate(config: Path | None) -> tuple[str | None, str]:
    """Migrate the database. Return the old and the new migration step."""
    with _opened(config, must_exist=False) as store:
        return store.migrate()


def backup(config: Path | None, target: Path) -> None:
    """Copy the database to *target*, even while the portal is running."""
    with _opened(config) as store:
        store.kind.back_up(target)


def verify(config: Path | None, expect: str | None = None) -> Verified:
    """Verify all audit entries, and check that one of them has the hash *expect*."""
    with _opened(config) as store:
        total = store.read(count)
        fault = store.read(lambda connection: first_fault(all_entries(connection), count=total))
        last = store.read(entries, after=max(0, total - 1))
        wanted = None if expect is None else store.read(entry_with_hash, expect.strip().lower())
    return Verified(total, last[-1].hash if last else "", fault, wanted)


def add_user(config: Path | None, name: str, *, password: str | None, role: str, scope: Sequence[str]) -> None:
    """Add or replace a local user.

    If *password* is None, the user can log in only through a proxy.
    """
    known = user_name_in(name)
    if known is None:
        shown = name[:MOST_CHARACTERS]
        raise BridgeError(f"{shown!r} is not a valid name. Use at most {MOST_CHARACTERS} visible characters.")
    user = User(
        person_key=local_key(known),
        user_name=known,
        password_hash=_hash_of(password),
        grants=(Grant(role=Role(role), scope=_scope(scope)),),
    )
    details = {"role": role, "scope": list(user.grants[0].scope)}
    _write(config, "user_added", details, lambda _: user)


def change_user(config: Path | None, name: str, *, role: str | None = None, scope: Sequence[str] | None = None) -> User:
    """Update a local user's role, scope, or both. Return the updated user."""
    if role is None and scope is None:
        raise BridgeError("Nothing to change. Use --role, --scope, or --all-vms.")
    changes: dict[str, Any] = {} if role is None else {"role": Role(role)}
    changes |= {} if scope is None else {"scope": _scope(scope)}

    def changed(user: User) -> dict[str, Any]:
        if issuer_of(user.person_key) != LOCAL:
            raise BridgeError(f"The groups of {user.user_name} determine the role. Change [[people.oidc.groups]].")
        return {"grants": (msgspec.structs.replace(user.grants[0], **changes),)}

    return _change(config, "user_changed", name, changes, changed)


def set_password(config: Path | None, name: str, password: str | None) -> User:
    """Set or remove a user's password. Return the updated user."""
    details = {"by": "proxy" if password is None else "password"}
    return _change(config, "user_password_changed", name, details, lambda _: {"password_hash": _hash_of(password)})


def disable_user(config: Path | None, name: str) -> User:
    """Disable a user."""
    return _change(config, "user_disabled", name, {}, lambda _: {"disabled_at": format_time(REAL_CLOCK.now())})


def enable_user(config: Path | None, name: str) -> User:
    """Enable a user."""
    return _change(config, "user_enabled", name, {}, lambda _: {"disabled_at": None})


def sign_out_user(config: Path | None, name: str) -> User:
    """End the sessions of a user."""
    return _change(config, "user_signed_out", name, {}, lambda _: {})


def list_users(config: Path | None) -> list[User]:
    """Return all users."""
    with _opened(config) as store:
        return store.read(all_users)


def _change(
    config: Path | None,
    action: str,
    name: str,
    details: Mapping[str, object],
    changed: Callable[[User], dict[str, Any]],
) -> User:
    def user_with_changes(connection: Connection) -> User:
        user = find_user(connection, name)
        if user is None:
            raise BridgeError(f"No user is called {name!r}. `portal users list` lists all users.")
        return msgspec.structs.replace(user, **changed(user))

    return _write(config, action, details, user_with_changes)


def _write(
    config: Path | None, action: str, details: Mapping[str, object], wanted: Callable[[Connection], User]
) -> User:
    def both(connection: Connection) -> User:
        user = put_user(connection, wanted(connection))
        entry = Entry(actor="portal users", action=action, subject=user.user_name, details=dict(details))
        add_entries(connection, [entry], at=format_time(REAL_CLOCK.now()))
        return user

    with _opened(config, must_exist=False) as store:
        store.migrate()
        return store.write(both)


def _hash_of(password: str | None) -> str | None:
    if password is not None and len(password) < SHORTEST_PASSWORD:
        raise BridgeError(f"A password must have at least {SHORTEST_PASSWORD} characters.")
    return None if password is None else PasswordHasher().hash(password)


def _scope(texts: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(map(scope_group, texts))
    except ValueError as error:
        raise BridgeError(str(error)) from error


def export(config: Path | None, form: str) -> Iterator[str]:
    """Yield all audit entries as text, one entry per line."""
    with _opened(config) as store:
        yield header(form)
        page = store.read(entries, after=0)
        while page:
            yield lines(page, form)
            page = store.read(entries, after=page[-1].entry)


@contextlib.contextmanager
def _opened(config: Path | None, *, must_exist: bool = True) -> Iterator[Store]:
    settings = load(config)
    where = settings.database.url or database_file(settings)
    missing = BridgeError(f"No database exists at {where}. The first start or `portal migrate` creates it.")
    if must_exist and isinstance(where, Path) and not where.exists():
        raise missing
    with contextlib.closing(Store.of_settings(settings)) as store:
        if must_exist and store.read(current) is None:
            raise missing
        yield store
