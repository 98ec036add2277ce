"""Changes during a decision: the portal checks the user and the scope again in the transaction of the decision."""

import asyncio
from datetime import timedelta

import msgspec
import pytest
from fleet_records import NOW, fleet_record, vm_id_of
from fold_kit import add
from portal_users import grant, local_user

from bridge.approval.signing import generate_key
from bridge.clock import format_time
from bridge.portal.deciding import submit
from bridge.portal.fleet import key_of_event_id
from bridge.portal.pending_decisions import PendingDecisions
from bridge.portal.settings import read
from bridge.portal.site import Site
from bridge.portal.store.database import Store, StoreThreads
from bridge.portal.store.event_details import verdicts_of
from bridge.portal.store.events import event_of
from bridge.portal.store.users import add_session, put_user
from bridge.portal.store.verdicts import VerdictRefused
from bridge.portal.users import AccessDenied, Person
from bridge.portal.verdicts import Choice
from bridge.testing import ManualClock

KEY = key_of_event_id("A")
AT = format_time(NOW)


class Office:
    """A store and the session of Pam, who can decide for the team payments."""

    def __init__(self, directory):
        self.store = Store.of_file(directory / "portal.db")
        self.store.migrate()
        self.clock = ManualClock()
        self._key_file = str(generate_key(directory / "portal.key").private_key_file)
        self.user = local_user("Pam", "approver", "labels.team:payments")
        self.store.write(put_user, self.user)
        until = format_time(self.clock.clock.now() + timedelta(hours=1))
        session = {"person_key": "local pam", "session_sha256": "5" * 64}
        self.store.write(add_session, at=AT, expires_at=until, idle_expires_at=until, **session)
        self.pam = Person(key="local pam", name="Pam", grants=self.user.grants, session_sha256="5" * 64)
        self.tell(fleet_record(0), fleet_record(1))

    def tell(self, *records):
        add(self.store, *records, at=AT)

    def disable(self):
        self.store.write(put_user, msgspec.structs.replace(self.user, disabled_at=AT))

    def say(self, word, person=None, *, meanwhile=None, broken_store=None):
        """Submit the decision *word*. *meanwhile* runs after the first check and before the write."""

        async def main():
            threads = StoreThreads(self.store)
            books = threads if broken_store is None else StoreThreads(broken_store)
            table = {"agents": {"token_env": "T"}, "signing": {"kid": "p1", "private_key_file": self._key_file}}
            site = Site(read(table), store=threads, clock=self.clock.clock)
            for vm in (0, 1):
                site.connected_agents.begins(vm_id_of(vm), "")
            site.pending_decisions = PendingDecisions(books, clock=self.clock.clock)
            if meanwhile is not None:
                site.store = _Slow(threads, meanwhile)
            digests = {KEY: self.store.read(event_of, KEY, now=AT).digest}
            try:
                [result] = await submit(site, person or self.pam, Choice(word), digests)
                if isinstance(result, VerdictRefused):
                    raise result
                return result
            finally:
                threads.close()
                books.close()

        return asyncio.run(main())

    @property
    def said(self):
        return [each.choice.value for each in self.store.read(verdicts_of, [KEY])]


class _Slow:
    """The threads of a store that run *meanwhile* before each write."""

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


def test_user_disabled_during_the_request_cannot_decide(office):
    with pytest.raises(AccessDenied) as refused:
        office.say("approve", meanwhile=office.disable)
    assert (refused.value.status, office.said) == (401, [])


def test_proxy_user_disabled_during_the_request_cannot_decide(office):
    proxied = Person(key="local pam", name="Pam", grants=grant())
    with pytest.raises(AccessDenied) as refused:
        office.say("approve", proxied, meanwhile=office.disable)
    assert (refused.value.status, office.said) == (403, [])


def test_vm_outside_the_scope_that_joins_during_the_request_blocks_the_decision(office):
    other = fleet_record(1, sequence=2, labels={"team": "search"})
    with pytest.raises(VerdictRefused, match="outside your scope"):
        office.say("approve", meanwhile=lambda: office.tell(other))
    assert office.said == []


def test_stored_hold_is_acknowledged_even_if_decisions_cannot_be_read(office, tmp_path):
    empty = Store.of_file(tmp_path / "empty.db")
    assert set(office.say("hold", broken_store=empty).sent_to) == {vm_id_of(0), vm_id_of(1)}
    assert office.said == ["hold"]
    empty.close()
