"""A portal with users, and browsers without JavaScript that keep a session cookie and submit forms."""

from __future__ import annotations

import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import requests
from argon2 import PasswordHasher
from fleet_records import NOW, fleet_record
from msgspec.structs import replace
from portal_kit import RunningPortal, poll, portal_table
from portal_users import local_user
from sqlalchemy import func, select
from waiting import until

from bridge.approval.signing import generate_key
from bridge.clock import Clock
from bridge.events.record import Approval, Transition
from bridge.portal.audit import Entry
from bridge.portal.schema import agents
from bridge.portal.settings import database_file, read
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import Store
from bridge.portal.store.users import put_user
from bridge.portal.users import COOKIE

PASSWORD = "correct horse battery staple"  # of a test
#: A fast argon2 hash. test_users.py tests the real parameters.
QUICK_HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(PASSWORD)
#: A minute after the records of `fleet_records`. The clock stands still, so agents stay connected after a poll.
AT_11_01 = Clock(now=lambda: NOW + timedelta(minutes=1), monotonic=lambda: 1_000.0)
#: The state of an agent that would follow an approval.
ABLE: dict[str, Any] = {"version": "9.9", "kids": ["p1"], "required_approvals": 1, "dry_run": False, "disabled": False}
PEOPLE = (("ann", "approver", ""), ("bob", "approver", ""), ("vic", "viewer", ""))


class Office:
    """A portal with the approvers Ann and Bob and the viewer Vic. A context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        people: dict[str, Any] | None = None,
        users: Any = PEOPLE,
        signs: bool = True,
        clock: Clock = AT_11_01,
    ) -> None:
        key = directory / "portal.key"
        self.public_key_file = key.with_name("portal.key.pub")
        if not key.exists():  # otherwise, an earlier portal created it
            generate_key(key)
        tables: dict[str, Any] = {"people": people or {}}
        if signs:
            tables["signing"] = {"kid": "p1", "private_key_file": str(key)}
        self.store = Store.of_file(database_file(read(portal_table(directory / "state"))))
        self.store.migrate()
        self._users = {
            name: local_user(name, role, *scope.splitlines(), password_hash=QUICK_HASH) for name, role, scope in users
        }
        for user in self._users.values():
            self.store.write(put_user, user)
        self.portal = RunningPortal(directory / "state", clock=clock, **tables)

    def __enter__(self) -> Office:  # noqa: PYI034  # Self came with Python 3.11
        self.portal.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.portal.stop()
        self.store.close()

    @property
    def origin(self) -> str:
        """Return the origin of the portal."""
        return self.portal.url.removesuffix("/api/v1")

    def change_user(self, name: str, **change: Any) -> None:
        """Store the user with *change*, as `portal users` does while the portal runs."""
        entry = Entry(actor="portal users", action="user_added", subject=name, details={})
        self.store.write(put_user, replace(self._users[name], **change))
        self.store.write(add_entries, [entry], at="2026-11-20T11:01:00.000Z")

    def browser(self, name: str | None = None) -> Browser:
        """Return a browser with a session of *name*."""
        browser = Browser(self.origin)
        if name is not None:
            answer = browser.sign_in(name)
            assert answer.status_code == 303, answer.text
        return browser

    def wait_for_stored_agents(self, count: int) -> None:
        """Wait until the portal has stored *count* agents, which a restart shows as reconnecting."""
        query = select(func.count()).select_from(agents)
        until(lambda: self.store.read(lambda connection: connection.execute(query).scalar_one()) >= count)

    def tell_outcome(self, transition: Transition, result: str) -> None:
        """Send the outcome of the first approval from the agent of the first VM."""
        entries = self.portal.get("/audit").json()["entries"]
        entry = next(each for each in entries if each["action"] == "approved")
        outcome = fleet_record(0, sequence=2, transition=transition, seconds=30)
        hashes = tuple(entry["details"]["events"][0]["decisions"].values())[:1]
        approval = Approval(source="portal", result=result, reason="a sentence", jws_sha256=hashes)
        self.portal.send(replace(outcome, approval=approval))

    def poll(self, vm: int, *, index: int = 0, wait: int = 1, **says: Any) -> dict[str, Any]:
        """Poll for decisions as the agent of *vm*, which reports *says*."""
        return poll(self.portal.url, vm, index=index, wait=wait, **says)


class Browser:
    """A browser without JavaScript. It keeps one cookie itself, because the library would send it only over TLS."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.cookie: str | None = None
        self.headers: dict[str, str] = {}

    def get(self, path: str, **more: Any) -> requests.Response:
        """GET a page without following redirects."""
        return self._ask("GET", path, **more)

    def post(self, path: str, fields: Any, *, origin: str | None = "own", **more: Any) -> requests.Response:
        """POST a form from a page of this portal, or from *origin*."""
        headers = {} if origin is None else {"Origin": self.origin if origin == "own" else origin}
        return self._ask("POST", path, data=fields, headers=headers, **more)

    def sign_in(self, name: str, password: str = PASSWORD, **fields: str) -> requests.Response:
        """Sign in, and keep the cookie."""
        return self.post("/login", {"name": name, "password": password, **fields})

    def page(self, path: str) -> Page:
        """Return the page at *path*, which must exist."""
        answer = self.get(path)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return Page(answer.text)

    def submit(self, path: str, button: str, **fields: str) -> requests.Response:
        """Press *button* (its verdict, or its first word) on the page at *path* with *fields*."""
        form, pressed = self.page(path).form_with(button)
        return self.post(form.action, [*({**dict(form.single), **fields}.items()), *form.repeated, *pressed])

    def _ask(self, method: str, path: str, *, headers: dict[str, str] | None = None, **more: Any) -> requests.Response:
        sent = {**self.headers, **(headers or {})}
        if self.cookie is not None:
            sent["Cookie"] = f"{COOKIE}={self.cookie}"
        answer = requests.request(
            method, f"{self.origin}{path}", headers=sent, allow_redirects=False, timeout=20, **more
        )
        found = re.match(f'{COOKIE}="?([^;"]*)', answer.headers.get("Set-Cookie", ""))
        if found:
            self.cookie = found[1] or None
        return answer


class Form:
    """A form of a page."""

    def __init__(self, action: str, method: str) -> None:
        self.action, self.method = action, method
        self.fields: list[tuple[str, str]] = []
        self.buttons: list[tuple[str, str, str]] = []
        """The name, value, and visible text of each button."""

    @property
    def single(self) -> list[tuple[str, str]]:
        """Return the fields that occur once."""
        names = [name for name, _ in self.fields]
        return [(name, value) for name, value in self.fields if names.count(name) == 1]

    @property
    def repeated(self) -> list[tuple[str, str]]:
        """Return the fields that occur more than once."""
        names = [name for name, _ in self.fields]
        return [(name, value) for name, value in self.fields if names.count(name) > 1]


class Page(HTMLParser):
    """A parsed page: its text and its forms."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.forms: list[Form] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._parts: list[str] = []
        self._button: list[str] | None = None
        self.feed(html)

    @property
    def text(self) -> str:
        """Return the text with single spaces."""
        return " ".join("".join(self._parts).split())

    def form_with(self, button: str) -> tuple[Form, list[tuple[str, str]]]:
        """Return the first form that has *button*, and the fields of the pressed button."""
        for form in self.forms:
            for name, value, text in form.buttons:
                if button in (value, text) or text.startswith(button):
                    return form, [(name, value)] if name else []
        raise AssertionError(f"no button {button!r} on the page, only {[form.buttons for form in self.forms]}")

    @property
    def buttons(self) -> list[str]:
        """Return the text of every button."""
        return [text for form in self.forms for _, _, text in form.buttons]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Handle a start tag."""
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "form":
            self.forms.append(Form(found.get("action") or "", found.get("method") or "get"))
        elif tag == "input" and self.forms and found.get("type") != "checkbox":
            self.forms[-1].fields.append((found.get("name") or "", found.get("value") or ""))
        elif tag == "button":
            self._button = [found.get("name") or "", found.get("value") or "", ""]

    def handle_endtag(self, tag: str) -> None:
        """Handle an end tag. Separate elements on the screen get a space between their texts."""
        if tag not in {"b", "a", "time", "span"}:
            self._parts.append(" ")
        if tag == "button" and self._button is not None:
            name, value, text = self._button
            self.forms[-1].buttons.append((name, value, " ".join(text.split())))
            self._button = None

    def handle_data(self, data: str) -> None:
        """Handle text."""
        self._parts.append(data)
        if self._button is not None:
            self._button[2] += data
