"""The desk asks who decides once more where nobody else writes, and says what it did when agents are told later."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, vm_id_of

from bridge.approval.signing import DecisionSigner, generate_key
from bridge.clock import format_time
from bridge.events.event import encode
from bridge.portal.book import DecisionBook
from bridge.portal.connections import Connections
from bridge.portal.desk import Desk, Said
from bridge.portal.fleet import key_of_event_id
from bridge.portal.people import Person, PersonRefused, Role
from bridge.portal.signing import PortalKey
from bridge.portal.store.database import Store, StoreThreads
from bridge.portal.store.events import event_of
from bridge.portal.store.ingest import ReceivedRecord, add_records
from bridge.portal.store.people import User, add_session, add_user, change_user
from bridge.portal.store.verdicts import verdicts_of
from bridge.portal.verdicts import Word
from bridge.testing import ManualClock

KEY = key_of_event_id("A")
AT = format_time(NOW)


class Office:
    """A desk, and Pam with a session, who may decide for the team payments."""

    def __init__(self, directory):
        self.store = Store.of_file(directory / "portal.db")
        self.store.migrate()
        self.clock = ManualClock()
        pair = generate_key(directory / "portal.key")
        self._key = PortalKey(DecisionSigner(pair.private_key_file, kid="p1", approver="portal"))
        self.user = User(user_name="Pam", password_hash=None, role="approver", scope="labels.team:payments", made_at=AT)
        self.store.write(add_user, self.user)
        until = format_time(self.clock.clock.now() + timedelta(hours=1))
        session = {"user_name": "Pam", "new_sha256": "5" * 64, "csrf_token": "t", "at": AT, "until": until}
        self.store.write(add_session, **session)
        self.pam = Person(
            name="Pam", role=Role.APPROVER, scope=self.user.scopes, csrf_token="t", session_sha256="5" * 64
        )
        self.tell(fleet_record(0), fleet_record(1))

    def tell(self, *records):
        self.store.write(add_records, [ReceivedRecord(each, encode(each).decode()) for each in records], AT)

    def say(self, word, person=None, *, meanwhile=None, broken_book=None):
        """Say *word*; *meanwhile* is done by another process after the desk has first looked."""

        async def main():
            threads = StoreThreads(self.store)
            books = threads if broken_book is None else StoreThreads(broken_book)
            connections = Connections(self.clock.clock)
            for vm in (0, 1):
                connections.begins(vm_id_of(vm), "")
            desk = Desk(
                store=threads if meanwhile is None else _Slow(threads, meanwhile),
                book=DecisionBook(books, clock=self.clock.clock),
                connections=connections,
                key=self._key,
                required=1,
                clock=self.clock.clock,
            )
            said = Said(event_key=KEY, word=Word(word), digest=self.store.read(event_of, KEY).digest)
            try:
                return await desk.say(person or self.pam, said)
            finally:
                threads.close()
                books.close()

        return asyncio.run(main())

    @property
    def said(self):
        return [each.word.value for each in self.store.read(verdicts_of, KEY)]


class _Slow:
    """The threads of a store, at which a write waits while something else is written."""

    def __init__(self, threads, meanwhile):
        self.read = threads.read
        self._write = threads.write
        self._meanwhile = meanwhile

    async def write(self, *args, **kwargs):
        self._meanwhile()
        return await self._write(*args, **kwargs)


@pytest.fixture
def office(tmp_path):
    office = Office(tmp_path)
    yield office
    office.store.close()


def test_person_who_is_disabled_while_the_request_waits_decides_nothing(office):
    with pytest.raises(PersonRefused) as refused:
        office.say("approve", meanwhile=lambda: office.store.write(change_user, "Pam", disabled_at=AT))
    assert (refused.value.status, office.said) == (401, [])


def test_person_of_a_proxy_who_is_disabled_while_the_request_waits_decides_nothing(office):
    proxied = Person(name="Pam", role=Role.APPROVER, csrf_token="t")
    with pytest.raises(PersonRefused) as refused:
        office.say("approve", proxied, meanwhile=lambda: office.store.write(change_user, "Pam", disabled_at=AT))
    assert (refused.value.status, office.said) == (403, [])


def test_vm_outside_the_scope_that_tells_of_the_event_meanwhile_is_not_spoken_for(office):
    other = fleet_record(1, sequence=2, labels={"team": "search"})
    with pytest.raises(PersonRefused, match="outside your scope"):
        office.say("approve", meanwhile=lambda: office.tell(other))
    assert office.said == []


def test_hold_that_is_stored_is_answered_for_although_the_book_cannot_be_read_now(office, tmp_path):
    empty = Store.of_file(tmp_path / "empty.db")
    assert set(office.say("hold", broken_book=empty).told) == {vm_id_of(0), vm_id_of(1)}
    assert office.said == ["hold"]
    empty.close()
