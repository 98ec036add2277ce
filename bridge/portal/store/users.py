"""The rows of users and their sessions."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, select, update

from bridge.portal.schema import properties, sessions, users
from bridge.portal.store.database import insert, upsert
from bridge.portal.user_names import folded_name

_CSRF_KEY = "csrf_key"
_APPROVER = "approver"


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A user with a local name."""

    user_name: str
    password_hash: str | None
    """If the value is None, only a proxy can authenticate this user."""
    role: str
    scope: str
    """Groups of VMs, one per line. An empty text means all VMs."""
    made_at: str
    disabled_at: str | None = None

    @property
    def scopes(self) -> tuple[str, ...]:
        """Return the groups of the scope."""
        return tuple(filter(None, self.scope.splitlines()))


def add_user(connection: Connection, user: User) -> User | None:
    """Add or replace a user, and end the user's sessions."""
    names = _spellings(connection, user.user_name) or [user.user_name]
    connection.execute(delete(sessions).where(sessions.c.user_name.in_(names)))
    upsert(connection, users, [{**msgspec.structs.asdict(user), "user_name": name} for name in names])
    return user_of(connection, user.user_name)


def change_user(connection: Connection, name: str, /, **values: Any) -> User | None:
    """Update a known user, and end the user's sessions."""
    names = _spellings(connection, name)
    connection.execute(delete(sessions).where(sessions.c.user_name.in_(names)))
    if values:
        connection.execute(update(users).where(users.c.user_name.in_(names)).values(**values))
    return user_of(connection, name)


def user_of(connection: Connection, name: str) -> User | None:
    """Return the user of that name in any spelling, or None if the name is unknown."""
    names = _spellings(connection, name)
    found = connection.execute(select(users).where(users.c.user_name.in_(names)).order_by(users.c.user_name)).first()
    return None if found is None else User(**found._asdict())


def names_barred(connection: Connection) -> frozenset[str]:
    """Return the folded names of users who are disabled or are not approvers."""
    is_barred = users.c.disabled_at.is_not(None) | (users.c.role != _APPROVER)
    return frozenset(map(folded_name, connection.execute(select(users.c.user_name).where(is_barred)).scalars()))


def _spellings(connection: Connection, name: str) -> list[str]:
    wanted = folded_name(name)  # SQL can fold only ASCII
    return [each for each in connection.execute(select(users.c.user_name)).scalars() if folded_name(each) == wanted]


def all_users(connection: Connection) -> list[User]:
    """Return all users by name."""
    return [User(**row._asdict()) for row in connection.execute(select(users).order_by(users.c.user_name))]


def add_session(
    connection: Connection, *, user_name: str, new_sha256: str, csrf_token: str, at: str, until: str
) -> None:
    """Store a session and delete the expired ones."""
    connection.execute(delete(sessions).where(sessions.c.expires_at <= at))
    row = {
        "session_sha256": new_sha256,
        "user_name": user_name,
        "csrf_token": csrf_token,
        "made_at": at,
        "expires_at": until,
    }
    connection.execute(sessions.insert(), row)


def session_of(connection: Connection, session_sha256: str, *, at: str) -> tuple[User, str] | None:
    """Return a session's user and CSRF token; None if the session or user is invalid."""
    query = select(sessions.c.csrf_token, users).join_from(sessions, users)
    is_live = (sessions.c.session_sha256 == session_sha256) & (sessions.c.expires_at > at)
    row = connection.execute(query.where(is_live, users.c.disabled_at.is_(None))).first()
    if row is None:
        return None
    values = row._asdict()
    csrf_token = values.pop("csrf_token")
    return User(**values), csrf_token


def end_session(connection: Connection, session_sha256: str) -> None:
    """Delete a session."""
    connection.execute(delete(sessions).where(sessions.c.session_sha256 == session_sha256))


def csrf_key(connection: Connection) -> str:
    """Return the key for the CSRF tokens of people without a session. Create a missing key."""
    new = insert(connection, properties).values(name=_CSRF_KEY, value=secrets.token_hex(32)).on_conflict_do_nothing()
    connection.execute(new)
    return str(connection.execute(select(properties.c.value).where(properties.c.name == _CSRF_KEY)).scalar_one())
