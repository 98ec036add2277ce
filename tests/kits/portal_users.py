"""Users of a portal for tests."""

from __future__ import annotations

from typing import Any

from bridge.portal.grants import Grant, Role
from bridge.portal.store.users import User
from bridge.portal.user_names import local_key


def grant(role: str = "approver", *scope: str) -> tuple[Grant, ...]:
    """Return one grant."""
    return (Grant(role=Role(role), scope=scope),)


def local_user(name: str, role: str = "approver", *scope: str, **values: Any) -> User:
    """Return a local user with one grant."""
    return User(
        **{"person_key": local_key(name), "user_name": name, "grants": grant(role, *scope), "made_at": "2026"} | values
    )
