"""Authenticates people and checks their permissions.

People sign in with a name and a password, or through a configured proxy that sends their name in a header. Requests
that change data must come from the portal's own origin and contain a valid CSRF token. The database stores only a
SHA-256 hash of each session cookie.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping
from datetime import timedelta

import msgspec
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import Connection
from starlette.requests import Request

from bridge.clock import Clock, format_time
from bridge.logs import ThrottledLog
from bridge.portal.addresses import AddressQueue, Networks, QueueFull, block_of
from bridge.portal.audit import Entry
from bridge.portal.fleet import EventState
from bridge.portal.grants import Grant, Role, can_approve, scope_of
from bridge.portal.http_limits import CONNECTION
from bridge.portal.oidc_sessions import OidcSessions
from bridge.portal.requests import RequestRefused
from bridge.portal.settings import PeopleSettings
from bridge.portal.store import users as store_users
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.user_names import local_key, user_name_in

logger = logging.getLogger(__name__)

#: Because of the prefix `__Host-`, a browser accepts the cookie only over TLS or from localhost, and only for one host.
COOKIE = "__Host-scheduled-events-portal"
_SESSION_BYTES = 32
#: After this number of wrong passwords from one address, further logins from this address must wait.
#: Wrong passwords never delay other addresses. Otherwise, a stranger could lock a user out.
_MOST_WRONG = 5
_WRONG_SECONDS = 300.0
_MOST_REMEMBERED = 10_000
#: The hash of an unused password. A login with an unknown name must take as long as a login with a known name.
UNUSED_HASH = "$argon2id$v=19$m=65536,t=3,p=4$NODTa3+FH8YWtHER2am/vg$4iqmJnJsGYRtmaLk+wzwN/Pwv000lt7CzysQeENAI+I"
_ACTIVITY_SECONDS = 60.0


class AccessDenied(RequestRefused):
    """Access is denied. *status* is 401, 403, or 429."""


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated person."""

    key: str
    """The issuer and the subject (`bridge.portal.user_names.person_key`)."""
    name: str
    grants: tuple[Grant, ...]
    """At least one role, each with its scope."""
    session_sha256: str | None = None
    """The value is None if a proxy authenticates each request of this person."""

    @property
    def scope(self) -> tuple[str, ...]:
        """Groups of VMs that the person can see. An empty scope means all VMs."""
        return scope_of(self.grants, *Role) or ()

    @property
    def roles(self) -> str:
        """Return the names of the roles, such as "viewer, approver"."""
        return ", ".join(role.value for role in Role if scope_of(self.grants, role) is not None)

    @property
    def why_not_approver(self) -> str | None:
        """Return the reason why this person cannot decide on any event, or None."""
        if scope_of(self.grants, Role.OPERATOR) is not None:
            return "You are an operator. Only an approver can decide."
        return None if can_approve(self.grants) else "You are a viewer. Only an approver can decide."

    def may_see(self, event: EventState) -> bool:
        """Return whether one of the event's VMs is in the scope."""
        return not self.scope or not set(self.scope).isdisjoint(event.groups)

    def why_not_decide(self, event: EventState, *, is_hold: bool = False) -> str | None:
        """Return the reason why this person must not decide on *event*, or None.

        A person with a limited scope can hold an event if at least one of its VMs is in the scope. An approval affects
        all VMs in Resources, so the person can approve only if each of these VMs is confirmed and in the scope.
        """
        if self.why_not_approver is not None:
            return self.why_not_approver
        scope = set(scope_of(self.grants, Role.APPROVER) or ())
        if not scope:
            return None
        if is_hold:
            return "No VM of the event is in your scope." if scope.isdisjoint(event.groups) else None
        outside = [vm.name or vm.vm_key for vm in event.vms if vm.is_member and scope.isdisjoint(vm.groups)]
        outside += [f"{name} (not confirmed)" for name in event.unconfirmed]
        return f"The event includes VMs outside your scope: {', '.join(outside)}." if outside else None


def still(connection: Connection, person: Person, *, at: str) -> Person:
    """Return *person* with the current grants, and with the stored name.

    Raise AccessDenied if the session has ended or the person is disabled.
    """
    if person.session_sha256 is not None:
        found = store_users.session_of(connection, person.session_sha256, at=at)
        if found is None:
            raise AccessDenied(401, "Sign in first.")
        return msgspec.structs.replace(person, name=found.user.user_name, grants=found.grants)
    user = store_users.user_of(connection, person.key)
    if user is None:
        return person
    if user.disabled_at is not None:
        raise AccessDenied(403, "This person may not use the portal.")
    return msgspec.structs.replace(person, name=user.user_name, grants=user.grants)


class Users:
    """Authenticates people."""

    def __init__(self, settings: PeopleSettings, *, store: StoreThreads, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.session = timedelta(hours=settings.session_hours)
        self._idle = timedelta(minutes=settings.idle_minutes)
        self.oidc: OidcSessions | None = None
        if settings.oidc is not None:
            self.oidc = OidcSessions(settings.oidc, origin=settings.origin or "", store=store, clock=clock)
        self._local_login_from = None if settings.oidc is None else Networks(settings.local_login_from)
        self._origin = settings.origin.lower() if settings.origin else None
        self._proxy_header = settings.proxy_header
        self._proxies = Networks(settings.proxy_addresses)
        self._proxy_role = Role(settings.proxy_role)
        later = [group.role for group in settings.oidc.groups] if settings.oidc else []
        later += [self._proxy_role] if self._proxy_header else []
        #: Whether people who are not in the database yet can log in as approvers.
        self.others_may_approve = Role.APPROVER in later
        # Each check of a password needs 64 MiB and takes about 50 ms.
        self._hashing = AddressQueue(running=2, running_of_block=1, waiting=1_000, waiting_of_block=20)
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()
        """The times of recent wrong passwords by client address, with the newest address at the end."""
        self._csrf_key = b""
        self._log = ThrottledLog(logger, clock=clock)

    async def load(self) -> None:
        """Read the CSRF key that all processes of the portal share."""
        self._csrf_key = bytes.fromhex(await self._store.write(store_users.csrf_key))

    async def person_of(self, request: Request) -> Person:
        """Return the person who sent *request*. Raise AccessDenied (401) if the person is unknown."""
        peer: tuple[str, int] | None = request.scope[CONNECTION].client
        names = request.headers.getlist(self._proxy_header) if self._proxy_header else []
        if names and peer is not None and peer[0] in self._proxies:
            return await self._proxied(",".join(names))
        session_id = request.cookies.get(COOKIE, "")
        session_sha256 = _sha256(session_id)
        found = await self._session_of(session_sha256) if session_id else None
        if found is not None and self.oidc is not None and found.is_refresh_due(self._now()):
            await self.oidc.refreshed(session_sha256, session_id, found)
            found = await self._session_of(session_sha256)
        if found is None:
            raise AccessDenied(401, "Sign in first.")
        # The automatic updates of an open page are not activity.
        if request.url.path != "/live" and "part" not in request.query_params:
            await self._note_activity(session_sha256, found)
        user = found.user
        return Person(key=user.person_key, name=user.user_name, grants=found.grants, session_sha256=session_sha256)

    async def _session_of(self, session_sha256: str) -> store_users.Session | None:
        return await self._store.read(store_users.session_of, session_sha256, at=self._now())

    def csrf_token(self, person: Person, pad: str = "") -> str:
        """Return a CSRF token that is valid for the session of *person*.

        The portal compresses responses. If they all contained the same token, an attacker who can add text to a URL
        could guess the token from their size (the BREACH attack). A random pad therefore makes each token different.
        """
        pad = pad or secrets.token_hex(16)
        key = hmac.digest(self._csrf_key, (person.session_sha256 or person.key).encode(), hashlib.sha256)
        return f"{pad}.{hmac.digest(key, pad.encode(), hashlib.sha256).hex()}"

    def check_change(self, headers: Mapping[str, str], person: Person, token: str) -> None:
        """Raise AccessDenied (403) if the Origin or CSRF token is wrong."""
        self.check_origin(headers)
        valid = self.csrf_token(person, token.partition(".")[0])
        if not hmac.compare_digest(token.encode(), valid.encode()):
            raise AccessDenied(403, "The form belongs to another session. Load the page again.")

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Raise AccessDenied (403) unless the request's Origin is the portal's own."""
        host = headers.get("host", "").lower()
        own = {f"http://{host}", f"https://{host}"} if self._origin is None else {self._origin}
        if headers.get("origin", "").lower() not in own:
            raise AccessDenied(403, "The request comes from another site.")

    async def sign_in(self, name: str, password: str, *, address: str, old_session_id: str) -> str:
        """Start a session and return its ID, or raise AccessDenied."""
        if not self.allows_passwords(address):
            raise AccessDenied(403, "Local users cannot log in from this address.")
        client = block_of(address, ipv4_bits=32)
        self._check_attempts(client)
        try:
            async with self._hashing.turn(address):
                user = await self._known(user_name_in(name), password, client)
        except QueueFull:
            raise AccessDenied(429, "Too many people are signing in. Try again in a minute.") from None
        return await self.begin_session(user, old_session_id=old_session_id)

    def allows_passwords(self, address: str) -> bool:
        """Return whether local users can log in from *address*."""
        return self._local_login_from is None or address in self._local_login_from

    async def begin_session(
        self, user: store_users.User, *, old_session_id: str, session_id: str = "", **refresh: str | None
    ) -> str:
        """Start a session of *user* with a new ID, end the old session, and return the new ID."""
        session_id = session_id or new_session_id()
        now = self._clock.now()
        await self._store.write(
            _begin_session,
            user=user,
            session_sha256=_sha256(session_id),
            old_sha256=_sha256(old_session_id),
            at=format_time(now),
            expires_at=format_time(now + self.session),
            idle_expires_at=format_time(now + self._idle),
            **refresh,
        )
        return session_id

    async def _note_activity(self, session_sha256: str, found: store_users.Session) -> None:
        until = self._clock.now() + self._idle
        if found.idle_expires_at < format_time(until - timedelta(seconds=_ACTIVITY_SECONDS)):
            with contextlib.suppress(StoreUnavailable):  # the next request tries again
                await self._store.write(store_users.change_session, session_sha256, idle_expires_at=format_time(until))

    async def sign_out(self, person: Person) -> None:
        """End the session of *person*."""
        if person.session_sha256 is not None:
            await self._store.write(_end_session, person, at=self._now())

    async def _proxied(self, said: str) -> Person:
        # A comma means that the header is repeated, and the client might have sent one of the values.
        known = None if "," in said else user_name_in(_as_utf8(said))
        if known is None:
            raise AccessDenied(403, "This person may not use the portal.")
        person = Person(key=local_key(known), name=known, grants=(Grant(role=self._proxy_role),))
        return await self._store.read(still, person, at=self._now())

    def _check_attempts(self, client: str) -> None:
        times = self._wrong.get(client)
        if times is not None and len(times) == _MOST_WRONG and self._clock.monotonic() - times[0] < _WRONG_SECONDS:
            raise AccessDenied(429, "Too many wrong passwords. Wait five minutes.")

    async def _known(self, name: str | None, password: str, client: str) -> store_users.User:
        self._check_attempts(client)  # other attempts by the client might have failed while this attempt waited
        user = None if name is None else await self._store.read(store_users.user_of, local_key(name))
        known = user.password_hash if user is not None and user.disabled_at is None else None
        is_right = await asyncio.to_thread(_is_right, known or UNUSED_HASH, password)
        if user is not None and known is not None and is_right:
            return user
        self._wrong.setdefault(client, deque(maxlen=_MOST_WRONG)).append(self._clock.monotonic())
        self._wrong.move_to_end(client)
        if len(self._wrong) > _MOST_REMEMBERED:
            self._wrong.popitem(last=False)
        self._log.problem("sign-in", logging.WARNING, "A login failed, because the name or the password was wrong.")
        raise AccessDenied(401, "The name or the password is wrong.")

    def _now(self) -> str:
        return format_time(self._clock.now())


def new_session_id() -> str:
    """Return a random ID."""
    return secrets.token_urlsafe(_SESSION_BYTES)


def _is_right(password_hash: str, password: str) -> bool:
    try:
        return PasswordHasher().verify(password_hash, password)
    except (VerificationError, InvalidHashError, UnicodeEncodeError):
        return False


def _begin_session(
    connection: Connection, /, *, user: store_users.User, old_sha256: str, at: str, **session: str | None
) -> None:
    if store_users.user_of(connection, user.person_key) != user:
        raise AccessDenied(401, "The name or the password is wrong.")
    store_users.end_session(connection, old_sha256)
    store_users.add_session(connection, at=at, person_key=user.person_key, **session)
    entry = Entry(actor=user.user_name, action="signed_in", subject="", details={"person": user.person_key})
    add_entries(connection, [entry], at=at)


def _end_session(connection: Connection, person: Person, *, at: str) -> None:
    store_users.end_session(connection, person.session_sha256 or "")
    entry = Entry(actor=person.name, action="signed_out", subject="", details={"person": person.key})
    add_entries(connection, [entry], at=at)


def _as_utf8(text: str) -> str:
    try:  # the server has decoded the bytes of the header as Latin-1
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
