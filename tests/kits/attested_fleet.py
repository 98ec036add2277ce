"""One or two portals on one database, and agents that each have an attested token for their own VM only."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import requests
from fleet_records import NOW, vm_id_of
from page_kit import QUICK_HASH, Page
from portal_databases import Database
from portal_kit import BATCH, RunningPortal, batch, poll
from portal_users import csrf_token_of, local_user, start_session
from requests.adapters import HTTPAdapter

from bridge.approval.decision_token import Claims, verify_for_any_vm
from bridge.approval.signing import generate_key
from bridge.config.trusted_keys import TrustedKey
from bridge.events.record import TransitionRecord
from bridge.portal.agent_tokens import AgentTokens
from bridge.portal.store.users import put_user
from bridge.portal.users import COOKIE
from bridge.testing import ManualClock

_SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"
_ABLE = {"version": "1", "kids": ["p1"], "required_approvals": 1, "dry_run": False, "disabled": False}


class AttestedFleet:
    """The portals. Requests rotate among them."""

    def __init__(self, directory: Path, database: Database, clock: ManualClock, **tables: Any) -> None:
        self.clock = clock
        secret = secrets.token_hex(20)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "secret").write_text(f"{secret}\n", encoding="utf-8")
        (directory / "secret").chmod(0o600)
        pair = generate_key(directory / "portal.key")
        self.public_key_file = pair.public_key_file
        self._tokens = AgentTokens(lambda: [secret], clock=clock.clock)
        self._store = database.store()
        for name, scope in (("ann", ()), ("sam", ("labels.team:payments",)), ("eve", ("labels.team:search",))):
            self._store.write(put_user, local_user(name, "approver", *scope, password_hash=QUICK_HASH))
            start_session(self._store, name)
        attested = {"subscriptions": [_SUBSCRIPTION], "secret_file": str(directory / "secret")}
        whole = {
            "database": database.table,
            "agents": {"attested": attested},
            "signing": {"kid": "p1", "private_key_file": str(pair.private_key_file)},
            **tables,
        }
        self._number = 2 if "url" in database.table else 1
        self.portals = [
            RunningPortal(directory / f"portal{number}", clock=clock.clock, **whole) for number in range(self._number)
        ]
        self._turn = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[AttestedFleet]:
        """Run the portals."""
        with contextlib.ExitStack() as stack:
            for portal in self.portals:
                stack.enter_context(portal)
            yield self

    def portal(self) -> RunningPortal:
        """Return the portal for the next request."""
        self._turn += 1
        return self.portals[self._turn % self._number]

    def token_of(self, vm: int) -> str:
        """Return a new token of *vm*."""
        return self._tokens.new(vm_id_of(vm))

    def send(self, vm: int, *records: TransitionRecord, token: str | None = None) -> requests.Response:
        """POST *records* with the token of *vm*."""
        own = token or self.token_of(vm)
        return self.portal().post(batch(records), content_type=BATCH, token=own)

    def report(self, vm: int, *records: TransitionRecord, token: str | None = None) -> None:
        """Send *records*, which the portal must accept."""
        answer = self.send(vm, *records, token=token)
        assert answer.status_code == 204, answer.text

    def poll(
        self, vm: int, *, index: int = 0, wait: float = 1, token: str | None = None, **reported: Any
    ) -> dict[str, Any]:
        """Request decisions at each portal, as the agent of *vm*. Return the decisions of all portals."""
        token = token or self.token_of(vm)
        decisions: dict[str, None] = {}
        for portal in self.portals:
            found = poll(portal.url, vm, index=index, wait=wait, token=token, **{**_ABLE, **reported})
            decisions |= dict.fromkeys(found["decisions"])
        return {"decisions": list(decisions)}

    def claims(self, token: str, *, ahead_seconds: float = 0) -> Claims:
        """Verify a decision with a clock that is *ahead_seconds* ahead, and return its claims."""
        key = TrustedKey(kid="p1", approver="portal", public_key_file=str(self.public_key_file))
        return verify_for_any_vm(token, keys=[key], now=self.clock.clock.now() + timedelta(seconds=ahead_seconds))

    def page(self, person: str, path: str = "/") -> Page:
        """Return a page for *person*."""
        origin = self.portal().url.removesuffix("/api/v1")
        answer = requests.get(f"{origin}{path}", headers=_cookie_of(person), timeout=20)
        assert answer.status_code == 200, answer.text
        return Page(answer.text)

    def event(self, event_id: str) -> dict[str, Any]:
        """Return an event as the API shows it."""
        found: dict[str, Any] = self.portal().get(f"/events/{event_id}").json()["event"]
        return found

    def events(self, **query: str) -> dict[str, Any]:
        """Return the API response with the open events."""
        found: dict[str, Any] = self.portal().get("/events", **query).json()
        return found

    def decide(self, person: str, verdict: str, event_id: str, *confirm: str) -> requests.Response:
        """Submit a verdict of *person* with the form of the page."""
        event = self.event(event_id)
        fields = {
            "csrf": csrf_token_of(person),
            "event": f"{event['key']}:{event['digest']}",
            "verdict": verdict,
            "reason": "because",
            "confirm": [f"{event['key']}:{name}" for name in confirm],
        }
        return self.submit(person, "/decide", fields)

    def submit(self, person: str, path: str, fields: Any) -> requests.Response:
        """POST a form of a page as *person*."""
        origin = self.portal().url.removesuffix("/api/v1")
        headers = {**_cookie_of(person), "Origin": origin}
        return requests.post(f"{origin}{path}", data=fields, headers=headers, timeout=20, allow_redirects=False)

    def close(self) -> None:
        """Close the store of the users."""
        self._store.close()


def at_11_01() -> ManualClock:
    """Return a clock one minute after the records of `fleet_records`."""
    return ManualClock(NOW + timedelta(minutes=1))


def _cookie_of(person: str) -> dict[str, str]:
    return {"Cookie": f"{COOKIE}=session-of-{person}"}


class _FromAddress(HTTPAdapter):
    def __init__(self, address: str) -> None:
        self._address = address
        super().__init__()

    def init_poolmanager(self, *parts: Any, **more: Any) -> None:
        super().init_poolmanager(*parts, source_address=(self._address, 0), **more)


def client_at(address: str) -> requests.Session:
    """Return a client whose connections come from *address* of the network 127.0.0.0/8."""
    client = requests.Session()
    client.mount("http://", _FromAddress(address))
    return client


def log_in_at(client: requests.Session, portal: RunningPortal, name: str, password: str) -> int:
    """Submit the login form, and return the status of the response."""
    origin = portal.url.removesuffix("/api/v1")
    form = {"name": name, "password": password, "next": "/"}
    answer = client.post(f"{origin}/login", form, headers={"Origin": origin}, allow_redirects=False, timeout=60)
    return answer.status_code
