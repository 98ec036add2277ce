"""Logs people in through OpenID Connect, and reads their groups again every 15 minutes.

The database stores a refresh token only in encrypted form. The encryption key is derived from the session ID, which
only the browser keeps.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from cryptography.fernet import Fernet, InvalidToken
from sqlalchemy import Connection

from bridge.clock import Clock, format_time
from bridge.portal.oidc import Identity, LoginRefused, OidcProvider, derived
from bridge.portal.settings import OidcSettings
from bridge.portal.store import users as store_users
from bridge.portal.store.database import StoreThreads
from bridge.portal.user_names import person_key, user_name_in

_T = TypeVar("_T")
CALLBACK_PATH = "/login/callback"
_REFRESH = timedelta(minutes=15)
_AGAIN = timedelta(minutes=1)


class OidcSessions:
    """The logins and refreshes of one provider."""

    def __init__(self, settings: OidcSettings, *, origin: str, store: StoreThreads, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._provider = OidcProvider(settings, redirect_uri=f"{origin.rstrip('/')}{CALLBACK_PATH}", clock=clock)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="oidc")

    async def authorization_url(self, secret: str) -> str:
        """Return the URL of the provider's login page."""
        return await self._run(self._provider.authorization_url, secret)

    async def logout_url(self) -> str | None:
        """Return the URL of the provider's logout page, or None."""
        return await self._run(self._provider.logout_url)

    async def finish(
        self, secret: str, *, state: str, code: str, session_id: str
    ) -> tuple[store_users.User, dict[str, Any]]:
        """Return the user of a login, and the columns of the new session. Raise LoginRefused."""
        if not secret or not code or not hmac.compare_digest(state.encode(), derived(secret, "state").encode()):
            raise LoginRefused("This login was started in another browser, or has expired. Start the login again.")
        identity = await self._run(self._provider.exchanged, secret, code)
        user = await self._store.write(_put_identity, self._user(identity))
        if user.disabled_at is not None:
            raise LoginRefused("An operator has disabled your access.")
        return user, self._columns(identity, session_id)

    async def refreshed(self, session_sha256: str, session_id: str, found: store_users.Session) -> None:
        """Read the person's groups again.

        If the groups cannot be read, the session has only the viewer role until a later attempt succeeds.
        """
        now = self._clock.now()
        at, until = format_time(now), format_time(now + _AGAIN)
        if not await self._store.write(store_users.claim_refresh, session_sha256, at=at, until=until):
            return  # another request refreshes the session
        subject = found.user.person_key.partition(" ")[2]
        try:
            token = _cipher(session_id).decrypt((found.refresh_token or "").encode()).decode()
            identity = await self._run(self._provider.refreshed, token, subject)
        except (LoginRefused, InvalidToken):
            await self._store.write(store_users.change_session, session_sha256, is_reduced=True)
            return
        if not self._settings.grants(identity.groups):
            await self._store.write(store_users.end_session, session_sha256)
            return
        await self._store.write(_put_identity, self._user(identity))
        columns = {**self._columns(identity, session_id), "is_reduced": False}
        await self._store.write(store_users.change_session, session_sha256, **columns)

    def _user(self, identity: Identity) -> store_users.User:
        grants = self._settings.grants(identity.groups)
        if not grants:
            raise LoginRefused("None of your groups has a role in this portal.")
        return store_users.User(
            person_key=person_key(self._settings.issuer, identity.subject),
            user_name=user_name_in(identity.name) or identity.subject,
            grants=grants,
        )

    def _columns(self, identity: Identity, session_id: str) -> dict[str, Any]:
        token = identity.refresh_token
        return {
            "refresh_token": None if token is None else _cipher(session_id).encrypt(token.encode()).decode(),
            "refresh_at": format_time(self._clock.now() + _REFRESH),
        }

    def close(self) -> None:
        """Wait for running requests to the provider, and cancel waiting requests."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _put_identity(connection: Connection, user: store_users.User) -> store_users.User:
    """Store the current name and grants of *user*.

    The sessions stay valid, and a disabled user stays disabled.
    """
    known = store_users.user_of(connection, user.person_key)
    if known is not None:
        user = msgspec.structs.replace(user, disabled_at=known.disabled_at)
    store_users.keep_user(connection, user)
    return user


def _cipher(session_id: str) -> Fernet:
    key = hmac.digest(session_id.encode(), b"refresh-token", hashlib.sha256)
    return Fernet(base64.urlsafe_b64encode(key))
