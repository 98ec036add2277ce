"""Authentication of users: passwords, sessions, proxy headers, guessing, session fixation, and CSRF."""

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from argon2 import PasswordHasher
from fleet_records import fleet_record
from fold_kit import only_event
from portal_users import grant, local_user, person_of

from bridge.portal.settings import PeopleSettings
from bridge.portal.store.audit import entries
from bridge.portal.store.database import Store, StoreThreads
from bridge.portal.store.users import put_user, user_of
from bridge.portal.user_names import local_key
from bridge.portal.users import AccessDenied, Person, Users
from bridge.testing import ManualClock

PASSWORD = "correct horse battery staple"  # of a test
HASH = PasswordHasher().hash(PASSWORD)
AT = "2026-11-20T11:00:00.000Z"


class SessionKit:
    """The users of a portal: the approver Ann, the viewer Vic, and Pam, who can decide for one team."""

    def __init__(self, directory, **settings):
        self.store = Store.of_file(directory / "portal.db")
        self.store.migrate()
        for name, role, scope in (
            ("Ann", "approver", ""),
            ("Vic", "viewer", ""),
            ("Pam", "approver", "labels.team:payments"),
        ):
            self.store.write(put_user, local_user(name, role, *scope.split(), password_hash=HASH))
        self.clock = ManualClock()
        self._settings = PeopleSettings(**settings)

    def disable(self, name):
        user = self.store.read(user_of, local_key(name))
        return self.store.write(put_user, msgspec.structs.replace(user, disabled_at=AT))

    def run(self, work):
        async def main():
            threads = StoreThreads(self.store)
            people = Users(self._settings, store=threads, clock=self.clock.clock)
            await people.load()
            try:
                return await work(people)
            finally:
                threads.close()

        return asyncio.run(main())


@pytest.fixture
def kit(tmp_path):
    kit = SessionKit(tmp_path)
    yield kit
    kit.store.close()


def sign_in(people, name="Ann", password=PASSWORD, *, address="10.0.0.1", old=""):
    return people.sign_in(name, password, address=address, old_session_id=old)


async def refusal(awaitable):
    with pytest.raises(AccessDenied) as refused:
        await awaitable
    return refused.value.status


def test_correct_password_starts_a_session_with_a_cookie(kit):
    async def work(people):
        login = await sign_in(people, "ann")
        person = await person_of(people, login)
        assert (person.name, person.roles) == ("Ann", "approver")
        assert await refusal(person_of(people, login + "x")) == 401
        assert await refusal(person_of(people)) == 401
        await people.sign_out(person)
        assert await refusal(person_of(people, login)) == 401

    kit.run(work)
    assert [entry.action for entry in kit.store.read(entries, after=0)] == ["signed_in", "signed_out"]


def test_database_contains_no_password_and_no_session_id(kit, tmp_path):
    session_id = kit.run(sign_in)
    kit.store.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("portal.db*"))
    assert session_id.encode() not in stored
    assert PASSWORD.encode() not in stored
    assert b"$argon2id$" in stored


def test_login_invalidates_the_previous_session(kit):
    async def work(people):
        first = await sign_in(people)
        second = await sign_in(people, old=first)
        assert second != first
        assert await refusal(person_of(people, first)) == 401
        planted = "planted-by-an-attacker"
        third = await sign_in(people, old=planted)
        assert planted not in third
        assert await refusal(person_of(people, planted)) == 401

    kit.run(work)


def test_session_ends_at_its_expiry_and_when_the_user_is_disabled(kit):
    async def work(people):
        ann, vic = await sign_in(people), await sign_in(people, "Vic")
        kit.disable("Vic")
        assert await refusal(person_of(people, vic)) == 401
        assert await refusal(sign_in(people, "Vic")) == 401
        kit.clock.advance(timedelta(hours=8).total_seconds() + 1)
        assert await refusal(person_of(people, ann)) == 401

    kit.run(work)


def test_wrong_passwords_block_only_their_address_for_five_minutes(kit):
    async def work(people):
        statuses = [await refusal(sign_in(people, "Ann", "wrong", address=f"10.0.{turn}.1")) for turn in range(5)]
        assert statuses == [401] * 5
        assert await sign_in(people, address="10.0.9.1")
        statuses = [await refusal(sign_in(people, f"user-{turn}", "x", address="10.0.2.1")) for turn in range(6)]
        assert statuses == [401] * 4 + [429] * 2  # plus one guess of the first loop
        assert await refusal(sign_in(people, address="10.0.2.1")) == 429
        assert await sign_in(people, address="10.0.2.2")
        kit.clock.advance(301)
        assert await sign_in(people, address="10.0.2.1")

    kit.run(work)


def test_ipv6_network_counts_as_one_address(kit):
    async def work(people):
        for turn in range(5):
            assert await refusal(sign_in(people, "Ann", "wrong", address=f"2001:db8::{turn + 1}")) == 401
        assert await refusal(sign_in(people, address="2001:db8::77")) == 429
        assert await sign_in(people, address="2001:db8:0:1::1")

    kit.run(work)


def test_session_ends_after_an_idle_hour_and_live_updates_are_not_activity(kit):
    async def work(people):
        session = await sign_in(people)
        for _ in range(3):
            kit.clock.advance(50 * 60)
            assert await person_of(people, session)
        kit.clock.advance(50 * 60)
        assert await person_of(people, session, path="/live")
        kit.clock.advance(11 * 60)
        assert await refusal(person_of(people, session)) == 401

    kit.run(work)


def by_proxy(people, *names, address="10.0.0.5"):
    return person_of(people, headers=[("x-forwarded-user", name) for name in names], address=address)


def test_proxy_header_is_accepted_only_from_proxy_addresses(tmp_path):
    kit = SessionKit(tmp_path, proxy_header="X-Forwarded-User", proxy_addresses=("10.0.0.5",))

    async def work(people):
        assert (await by_proxy(people, "Ann")).roles == "approver"
        newcomer = await by_proxy(people, "eve@example.net")
        assert newcomer.roles == "viewer"
        assert await refusal(by_proxy(people, "Ann", address="10.0.0.6")) == 401
        assert await refusal(by_proxy(people, "")) == 403
        kit.disable("Ann")
        assert await refusal(by_proxy(people, "Ann")) == 403

    kit.run(work)
    kit.store.close()


def event_of(*records):
    with tempfile.TemporaryDirectory() as directory:
        store = Store.of_file(Path(directory) / "portal.db")
        store.migrate()
        found = only_event(store, *records)
        store.close()
    return found


def person(role="approver", *scope):
    return Person(key="local p", name="p", grants=grant(role, *scope))  # of a test


def test_scope_must_cover_every_vm_of_the_event():
    whole = event_of(fleet_record(0), fleet_record(1))
    mixed = event_of(fleet_record(0), fleet_record(1, labels={"team": "search"}))
    unheard = event_of(fleet_record(0))
    payments = person("approver", "labels.team:payments")
    assert person().why_not_decide(whole) is None
    assert payments.why_not_decide(whole) is None
    assert payments.why_not_decide(mixed) == "The event includes VMs outside your scope: vm_1."
    assert payments.why_not_decide(unheard) == "The event includes VMs outside your scope: vm_1 (not confirmed)."
    assert person("approver", "resource_group:west").why_not_decide(mixed) is None
    assert person("viewer").why_not_decide(whole) == "You are a viewer. Only an approver can decide."
    assert (payments.may_see(mixed), person("viewer", "labels.team:x").may_see(mixed)) == (True, False)


def test_grants_are_combined_and_an_operator_never_decides():
    mixed = event_of(fleet_record(0), fleet_record(1, labels={"team": "search"}))
    both = (*grant("approver", "labels.team:payments"), *grant("approver", "labels.team:search"))
    viewer = (*grant("approver", "labels.team:payments"), *grant("viewer"))
    ann = person()
    assert msgspec.structs.replace(ann, grants=both).why_not_decide(mixed) is None
    looks = msgspec.structs.replace(ann, grants=viewer)
    assert (looks.scope, looks.roles) == ((), "viewer, approver")
    assert looks.why_not_decide(mixed) == "The event includes VMs outside your scope: vm_1."
    operator = msgspec.structs.replace(ann, grants=(*grant("operator"), *grant("approver")))
    assert operator.why_not_decide(mixed) == "You are an operator. Only an approver can decide."


def test_user_name_spellings_identify_one_user(tmp_path):
    kit = SessionKit(tmp_path, proxy_header="X-Forwarded-User", proxy_addresses=("10.0.0.5",), proxy_role="approver")
    kit.store.write(put_user, local_user("Jos\u00e9 \u00c5sa", "viewer", password_hash=HASH))

    async def work(people):
        spellings = ["JOS\u00c9 \u00c5SA", "jose\u0301 a\u030asa", "Jos\u00e9  \u00c5sa"]
        spellings.append("Jos\u00e9 \u00c5sa".encode("latin-1"))
        for name in spellings:
            found = await by_proxy(people, name)
            assert (found.name, found.roles) == ("Jos\u00e9 \u00c5sa", "viewer"), name
        assert await sign_in(people, "jos\u00c9 \u00e5sa")
        assert kit.disable("JOS\u00c9 \u00c5SA")
        for name in spellings:
            assert await refusal(by_proxy(people, name)) == 403

    kit.run(work)
    kit.store.close()


def test_repeated_or_invalid_proxy_header_is_rejected(tmp_path):
    kit = SessionKit(tmp_path, proxy_header="X-Forwarded-User", proxy_addresses=("10.0.0.5",), proxy_role="approver")

    async def work(people):
        for name in ("eve,Ann", "Ann, eve", " ", "a\x00nn", "a\u200bnn", "ann\ufe0f", "a" * 257, "x" * 1_000_000):
            assert await refusal(by_proxy(people, name)) == 403, name[:20]
        assert await refusal(by_proxy(people, "Ann", "eve")) == 403

    kit.run(work)
    kit.store.close()


def test_concurrent_guesses_of_one_address_are_limited(kit):
    async def work(people):
        guesses = [refusal(sign_in(people, "Ann", "wrong", address="10.0.1.7")) for _ in range(60)]
        statuses = await asyncio.gather(*guesses)
        assert statuses.count(401) == 5
        assert set(statuses) == {401, 429}

    kit.run(work)


def test_throttled_client_does_not_fill_the_queue_of_its_address_block(kit):
    async def work(people):
        for _ in range(5):
            assert await refusal(sign_in(people, "Ann", "wrong", address="10.0.0.1")) == 401
        running = asyncio.ensure_future(sign_in(people, address="10.0.0.2"))
        throttled = [asyncio.ensure_future(refusal(sign_in(people, address="10.0.0.1"))) for _ in range(60)]
        await asyncio.sleep(0)
        assert await sign_in(people, address="10.0.0.3")
        assert set(await asyncio.gather(*throttled)) == {429}
        assert await running

    kit.run(work)
