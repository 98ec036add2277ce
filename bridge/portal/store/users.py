"""Stores users and their sessions."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, select, update

from bridge.errors import BridgeError
from bridge.portal.grants import Grant, Role, can_approve
from bridge.portal.schema import properties, sessions, users
from bridge.portal.store.database import insert, upsert
from bridge.portal.user_names import folded_name, local_key

_CSRF_KEY = "csrf_key"


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A local user, or a user who logged in through OpenID Connect."""

    person_key: str
    user_name: str
    password_hash: str | None = None
    """If the value is None, only a proxy or the OpenID Connect provider can authenticate this user."""
    grants: tuple[Grant, ...]
    disabled_at: str | None = None

    @property
    def can_approve(self) -> bool:
        """Return whether the approvals of this user count."""
        return self.disabled_at is None and can_approve(self.grants)


def put_user(connection: Connection, user: User) -> User:
    """Add or replace a user, and end the user's sessions."""
    connection.execute(delete(sessions).where(sessions.c.person_key == user.person_key))
    keep_user(connection, user)
    return user


def keep_user(connection: Connection, user: User) -> None:
    """Add or replace a user, and keep the user's sessions."""
    grants = msgspec.json.encode(user.grants).decode()
    upsert(connection, users, [{**msgspec.structs.asdict(user), "grants": grants}])


def find_user(connection: Connection, name: str) -> User | None:
    """Return the user with this name in any spelling, or with this person key.

    A local user takes precedence. Without one, raise BridgeError if several OpenID Connect users have the name.
    """
    found = user_of(connection, local_key(name)) or user_of(connection, name)
    if found is not None:
        return found
    named = [each for each in all_users(connection) if folded_name(each.user_name) == folded_name(name)]
    if len(named) > 1:
        keys = ", ".join(repr(each.person_key) for each in named)
        raise BridgeError(f"Several users are called {name!r}. Use one of these instead: {keys}.")
    return named[0] if named else None


def user_of(connection: Connection, person_key: str) -> User | None:
    """Return the user with *person_key*, or None if the user is unknown."""
    row = connection.execute(select(users).where(users.c.person_key == person_key)).first()
    return None if row is None else _user(row._asdict())


def barred_people(connection: Connection) -> frozenset[str]:
    """Return the keys of known users whose approvals do not count."""
    return frozenset(each.person_key for each in all_users(connection) if not each.can_approve)


def all_users(connection: Connection) -> list[User]:
    """Return all users, sorted by name."""
    return [_user(row._asdict()) for row in connection.execute(select(users).order_by(users.c.user_name))]


def _user(row: dict[str, Any]) -> User:
    return User(**{**row, "grants": msgspec.json.decode(row["grants"], type=tuple[Grant, ...])})


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A valid session."""

    user: User
    idle_expires_at: str
    refresh_token: str | None
    refresh_at: str | None
    """The time at which the portal reads the groups again, or None for a local user."""
    is_reduced: bool
    """Whether the last attempt to read the groups failed."""

    def is_refresh_due(self, now: str) -> bool:
        """Return whether the portal must read the groups again."""
        return self.refresh_at is not None and self.refresh_at <= now

    @property
    def grants(self) -> tuple[Grant, ...]:
        """Return the user's grants, each with the role viewer if the session is reduced."""
        if not self.is_reduced:
            return self.user.grants
        return tuple(Grant(role=Role.VIEWER, scope=grant.scope) for grant in self.user.grants)


def add_session(connection: Connection, /, *, at: str, **columns: str | None) -> None:
    """Store a session with these *columns*, and delete sessions that expired before *at*."""
    is_over = (sessions.c.expires_at <= at) | (sessions.c.idle_expires_at <= at)
    connection.execute(delete(sessions).where(is_over))
    connection.execute(sessions.insert(), {"is_reduced": False, **columns})


def session_of(connection: Connection, session_sha256: str, *, at: str) -> Session | None:
    """Return a session, or None if it has ended or its user is disabled."""
    names = ("idle_expires_at", "refresh_token", "refresh_at", "is_reduced")
    query = select(*(sessions.c[name] for name in names), users).join_from(sessions, users)
    is_live = (sessions.c.expires_at > at) & (sessions.c.idle_expires_at > at)
    is_live &= sessions.c.session_sha256 == session_sha256
    row = connection.execute(query.where(is_live, users.c.disabled_at.is_(None))).first()
    if row is None:
        return None
    values = row._asdict()
    own = {name: values.pop(name) for name in names}
    return Session(user=_user(values), **own)


def change_session(connection: Connection, session_sha256: str, /, **values: Any) -> None:
    """Update a session, if the session still exists."""
    connection.execute(update(sessions).where(sessions.c.session_sha256 == session_sha256).values(**values))


def claim_refresh(connection: Connection, session_sha256: str, *, at: str, until: str) -> bool:
    """Return whether the caller can use the refresh token.

    No other request uses the token before *until*.
    """
    is_due = (sessions.c.session_sha256 == session_sha256) & (sessions.c.refresh_at <= at)
    return connection.execute(update(sessions).where(is_due).values(refresh_at=until)).rowcount == 1


def end_session(connection: Connection, session_sha256: str) -> None:
    """Delete a session."""
    connection.execute(delete(sessions).where(sessions.c.session_sha256 == session_sha256))


def csrf_key(connection: Connection) -> str:
    """Return the key for CSRF tokens. Create a missing key."""
    new = insert(connection, properties).values(name=_CSRF_KEY, value=secrets.token_hex(32)).on_conflict_do_nothing()
    connection.execute(new)
    return str(connection.execute(select(properties.c.value).where(properties.c.name == _CSRF_KEY)).scalar_one())
