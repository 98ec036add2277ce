"""Verdicts in the database: serialized, on the current version of the event, with signed decisions for the VMs."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, vm_id_of
from fold_kit import add
from msgspec.structs import replace
from portal_users import grant, local_user

from bridge.approval.decision_token import verify
from bridge.approval.signing import DecisionSigner, generate_key
from bridge.clock import format_time
from bridge.config.trusted_keys import TrustedKey
from bridge.portal.connected_agents import AgentSeen, Connection
from bridge.portal.fleet import key_of_event_id
from bridge.portal.signing import addressees, decisions_for
from bridge.portal.store.audit import entries
from bridge.portal.store.decisions import live_decisions, newest_iat
from bridge.portal.store.events import event_of
from bridge.portal.store.users import put_user
from bridge.portal.store.verdicts import VerdictRefused, add_verdicts, withdraw
from bridge.portal.store.vms import vms_of_event
from bridge.portal.user_names import local_key
from bridge.portal.users import Person
from bridge.portal.verdicts import Choice, Outcome, Verdict

KEY = key_of_event_id("A")
DECIDED = NOW + timedelta(minutes=1)


class Office:
    """A store with an event of two VMs, and a third VM of the same resource group."""

    def __init__(self, directory, store):
        pair = generate_key(directory / "portal.key")
        self.public = TrustedKey(kid="portal-1", approver="portal", public_key_file=str(pair.public_key_file))
        self.key = DecisionSigner(pair.private_key_file, kid="portal-1", approver="portal")
        self.store = store
        self.agents = {vm_id_of(vm): AgentSeen(connection=Connection.CONNECTED) for vm in (0, 1, 2)}
        self.tell(fleet_record(0), fleet_record(1), fleet_record(2, event_id="B", resources=("vm_2",)))

    def tell(self, *records):
        add(self.store, *records, at=format_time(NOW))

    def sign(self, connection, event, ruling):
        asked = [vm.vm_key for vm in addressees(event, self.agents, "portal-1")]
        if ruling.outcome is Outcome.HELD:
            asked = vms_of_event(connection, event)
        newest = newest_iat(connection, event.key)
        return decisions_for(asked, event, ruling, signer=self.key, now=DECIDED, newest_iat=newest)

    def say(self, word, user_name, *, required=1, digest=None, after_seconds=0, minutes=60):
        now = DECIDED + timedelta(seconds=after_seconds)
        verdict = Verdict(
            verdict_id=str(uuid.uuid4()),
            event_key=KEY,
            choice=Choice(word),
            digest=digest or self.event.digest,
            person_key=user_name if "://" in user_name else local_key(user_name),
            user_name=user_name,
            reason="because",
            made_at=format_time(now),
            expires_at=format_time(now + timedelta(minutes=minutes)),
        )
        [result] = self.store.write(add_verdicts, [verdict], at=format_time(now), required=required, sign=self.sign)
        if isinstance(result, VerdictRefused):
            raise result
        return result

    def withdraw(self, verdict_id, name, *, required=1, now=DECIDED):
        key = name if "://" in name else local_key(name)
        by, at, until = Person(key=key, name=name, grants=()), format_time(now), format_time(now + timedelta(hours=1))
        return self.store.write(withdraw, verdict_id, by=by, at=at, until=until, required=required, sign=self.sign)

    @property
    def event(self):
        return self.store.read(event_of, KEY, now=format_time(DECIDED))

    def told(self):
        """Verify each delivered decision as its agent does, and return the VM, the verdict, and the reason."""
        _, found = self.store.read(live_decisions, now_seconds=DECIDED.timestamp())
        keys, words = [self.public], []
        for _, vm_key, jws in found:
            claims = verify(jws, keys=keys, audience=vm_key, now=DECIDED, created_at=NOW)
            words.append((vm_key, claims.verdict.value, claims.reason))
        return words

    def audited(self):
        return [(each.actor, each.action) for each in self.store.read(entries, after=0)]


@pytest.fixture
def office(tmp_path, store):
    return Office(tmp_path, store)


def test_approval_is_signed_for_one_vm_and_a_spare(office):
    taken = office.say("approve", "ann")
    assert taken.ruling.outcome is Outcome.APPROVED
    assert set(taken.sent_to) == {vm_id_of(0), vm_id_of(1)}
    assert office.told() == [(vm, "approve", "ann: because") for vm in taken.sent_to]
    assert office.audited() == [("ann", "approved")]


def test_first_approver_alone_decides_nothing_even_after_approving_twice(office):
    assert office.say("approve", "ann", required=2).sent_to == ()
    assert office.say("approve", "Ann", required=2, after_seconds=1).ruling.outcome is Outcome.WAITING
    assert office.told() == []
    taken = office.say("approve", "bob", required=2, after_seconds=2)
    assert (taken.ruling.outcome, len(taken.sent_to)) == (Outcome.APPROVED, 2)
    assert {reason for _, _, reason in office.told()} == {"Ann: because; bob: because"}


def test_spellings_of_a_user_name_count_as_one_person(office):
    for turn, name in enumerate(("Jos\u00e9", "JOSE\u0301", "jos\u00e9 ", "\uff4aos\u00e9")):
        assert office.say("approve", name, required=2, after_seconds=turn).ruling.outcome is Outcome.WAITING
    assert office.told() == []


def test_withdrawn_approval_sends_holds_and_withdrawn_hold_allows_approvals(office):
    approval = office.say("approve", "ann").verdict
    told = office.withdraw(approval.verdict_id, "bob", now=DECIDED).sent_to
    assert set(told) == {vm_id_of(vm) for vm in (0, 1, 2)}
    with pytest.raises(VerdictRefused, match="already withdrawn"):
        office.withdraw(approval.verdict_id, "bob", now=DECIDED)
    hold = office.say("hold", "cem", after_seconds=1).verdict
    assert office.withdraw(hold.verdict_id, "cem", now=DECIDED).sent_to == ()
    assert office.say("approve", "bob", after_seconds=2).ruling.outcome is Outcome.APPROVED
    assert ("bob", "withdrew") in office.audited()


def test_concurrent_approvals_are_serialized(office):
    together = threading.Barrier(8)

    def click(number):
        together.wait()
        return office.say("approve", f"user-{number}", required=8).ruling.outcome.value

    with ThreadPoolExecutor(8) as pool:
        outcomes = sorted(pool.map(click, range(8)))
    assert outcomes == ["approved", *["waiting"] * 7]


def test_first_approver_can_withdraw_a_delivered_approval(office):
    first = office.say("approve", "ann", required=2)
    office.say("approve", "bob", required=2, after_seconds=1)
    later = DECIDED + timedelta(seconds=2)
    taken = office.withdraw(first.verdict.verdict_id, "ann", now=later)
    assert taken.ruling.outcome is Outcome.HELD
    assert set(taken.sent_to) == {vm_id_of(vm) for vm in (0, 1, 2)}


@pytest.mark.parametrize("change", ["disabled", "viewer"])
def test_approval_of_a_former_approver_is_void_but_a_hold_remains_valid(office, change):
    user = local_user("Ann")
    office.store.write(put_user, user)
    office.say("approve", "Ann", required=2)
    if change == "disabled":
        office.store.write(put_user, replace(user, disabled_at=format_time(NOW)))
    else:
        office.store.write(put_user, replace(user, grants=grant("viewer")))
    taken = office.say("approve", "bob", required=2, after_seconds=1)
    assert (taken.ruling.outcome, taken.sent_to) == (Outcome.WAITING, ())
    office.say("hold", "Ann", after_seconds=2)
    with pytest.raises(VerdictRefused, match="held by Ann"):
        office.say("approve", "cat", after_seconds=3)


OIDC = "https://login.example.net"


def test_local_user_and_oidc_user_never_count_as_two_people(office):
    office.say("approve", f"{OIDC} ann", required=2)
    taken = office.say("approve", "ann-admin", required=2, after_seconds=1)
    assert (taken.ruling.outcome, taken.ruling.needed, taken.sent_to) == (Outcome.WAITING, 1, ())
    taken = office.say("approve", f"{OIDC} bob", required=2, after_seconds=2)
    assert taken.ruling.outcome is Outcome.APPROVED


def test_lifting_the_hold_of_another_person_needs_the_required_approvals(office):
    hold = office.say("hold", "ann", required=2).verdict
    for name in ("bob", "bob", f"{OIDC} bob"):
        assert office.withdraw(hold.verdict_id, name, required=2).ruling.needed == 1, name
        with pytest.raises(VerdictRefused, match="held by ann"):
            office.say("approve", "bob", required=2, after_seconds=1)
    assert office.withdraw(hold.verdict_id, "cat", required=2).ruling.needed == 0
    assert office.say("approve", "bob", required=2, after_seconds=2).ruling.outcome is Outcome.WAITING
    lifting = [action for _, action in office.audited() if action in {"agreed_to_lift", "withdrew"}]
    assert lifting == ["agreed_to_lift"] * 3 + ["withdrew"]


def test_consent_to_lift_a_hold_expires_after_an_hour(office):
    hold = office.say("hold", "ann", required=2).verdict
    office.withdraw(hold.verdict_id, "bob", required=2)
    later = DECIDED + timedelta(minutes=61)
    assert office.withdraw(hold.verdict_id, "cat", required=2, now=later).ruling.needed == 1


def test_holder_can_withdraw_the_hold_alone(office):
    hold = office.say("hold", "ann", required=2).verdict
    assert office.withdraw(hold.verdict_id, "Ann", required=2).ruling.needed == 0
