"""Users of a portal for tests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request

from bridge.portal.grants import Grant, Role
from bridge.portal.http_limits import CONNECTION
from bridge.portal.schema import properties
from bridge.portal.store.database import Store, upsert
from bridge.portal.store.users import User, add_session
from bridge.portal.user_names import local_key
from bridge.portal.users import COOKIE, Person, Users

_CSRF_KEY = bytes(32)


def grant(role: str = "approver", *scope: str) -> tuple[Grant, ...]:
    """Return one grant."""
    return (Grant(role=Role(role), scope=scope),)


def local_user(name: str, role: str = "approver", *scope: str, **values: Any) -> User:
    """Return a local user with one grant."""
    return User(**{"person_key": local_key(name), "user_name": name, "grants": grant(role, *scope)} | values)


async def person_of(
    users: Users,
    session_id: str = "",
    *,
    headers: Iterable[tuple[str, str | bytes]] = (),
    address: str = "10.0.0.9",
    path: str = "/",
) -> Person:
    """Return the person who sends a request with *headers* from *address*, in the session *session_id*."""
    whole = [("cookie", f"{COOKIE}={session_id}"), *headers]
    lines = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in whole]
    connection = SimpleNamespace(client=(address, 50_000))
    return await users.person_of(
        Request({"type": "http", "path": path, "query_string": b"", "headers": lines, CONNECTION: connection})
    )


def start_session(store: Store, name: str) -> None:
    """Store a session of the local user *name* that never expires. `session_headers` contains its cookie."""
    store.write(upsert, properties, [{"name": "csrf_key", "value": _CSRF_KEY.hex()}])
    until = "9999-01-01T00:00:00.000Z"
    session = {"person_key": local_key(name), "session_sha256": _session_sha256(name)}
    store.write(add_session, at="2026", expires_at=until, idle_expires_at=until, **session)


def session_headers(name: str) -> dict[str, str]:
    """Return the headers of a request in the session of *name*."""
    return {"Cookie": f"{COOKIE}=session-of-{name}", "X-CSRF-Token": csrf_token_of(name)}


def csrf_token_of(name: str) -> str:
    """Return a CSRF token for the session of *name*."""
    key = hmac.digest(_CSRF_KEY, _session_sha256(name).encode(), "sha256")
    return f"pad.{hmac.digest(key, b'pad', 'sha256').hex()}"


def _session_sha256(name: str) -> str:
    return hashlib.sha256(f"session-of-{name}".encode()).hexdigest()
