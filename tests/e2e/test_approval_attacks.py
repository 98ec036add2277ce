"""Approvals attacked and hindered from outside: a portal written from PROTOCOL.md, an agent process, a simulated Azure.

Two counts must be 0: approvals that nobody validly gave (forged, replayed, revoked, held, on an event that changed),
and valid approvals that are lost (kills, empty answers, a rebuilt database, early arrival, a key that is being written,
a thousand decisions at once, a clock that was wrong at the first start). Each story ends with a control: a valid
approval that comes last and must arrive, so that "nothing was posted" never means that nothing was read.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from contextlib import closing

import pytest
from approval_stage import NOTHING, RULE, Stage, only
from forgeries import forgeries

from bridge.testing import Fault, Simulator


@pytest.fixture
def stage(agent, tmp_path):
    with Simulator(vms=["vm_0"], rate_limit=False) as azure:
        made = Stage(agent, azure, tmp_path)
        yield made
        made.close()


# Approvals that nobody validly gave.


def delete_outbox(stage, *, damaged=False):
    """Delete every file of the outbox; if *damaged*, overwrite the databases instead."""
    for file in stage.agent.state.glob("outbox-*"):
        if damaged and file.suffix == ".db":
            file.write_bytes(b"damaged" * 4096)
        else:
            file.unlink()


def test_no_forged_or_malformed_decision_is_approved(stage):
    stage.start()
    target = stage.event()
    stage.put(*forgeries(stage.anne, stage.boris, stage.signer("mallory"), target))
    control = stage.control()
    assert stage.posted == only(control)
    assert sum(stage.refusals().values()) >= 10
    valid = stage.anne.decide(target)
    stage.put(valid)
    stage.wait_posted(target)
    stage.end()


def test_no_replayed_or_redirected_decision_is_approved(stage):
    stage.start()
    first, second = stage.event(), stage.event()
    followed = stage.anne.decide(first, jti="once")
    stage.put(followed)
    stage.wait_posted(first)
    stage.put(
        followed,
        followed,
        stage.anne.decide(second, jti="once"),
        stage.anne.decide(first, sub=second["event"]["event_id"]),
    )
    stage.put(stage.anne.decide(second, aud="11111111-2222-3333-4444-555555555555"))
    controls = [first, stage.control()]
    stage.agent.kill()
    stage.restart()
    stage.put(followed)
    controls.append(stage.control())
    assert stage.posted == only(*controls)
    assert stage.agent.stop() == 0
    delete_outbox(stage)
    stage.restart()
    stage.put(followed)
    controls.append(stage.control())
    assert stage.posted == only(*controls)
    stage.end()


def test_no_decision_counts_on_an_event_that_changed(stage):
    stage.start()
    changes = (
        {"duration_seconds": 600},
        {"notice_seconds": 1800},
        {"resources": ("vm_0", "vm_1", "vm_2")},
        {"event_source": "User"},
        {"event_type": "Reboot"},
    )
    before = [stage.event(duration_seconds=5) for _ in changes]
    stale = [stage.anne.decide(record) for record in before]
    for record, change in zip(before, changes, strict=True):
        stage.azure.world.update(record["event"]["event_id"], **change)
    stage.put(*stale)
    control = stage.control()
    assert stage.posted == only(control)
    assert stage.refusals()["event_changed"] >= 1
    stage.end()


def test_no_approval_passes_a_newer_hold_in_whatever_order_they_come(stage):
    stage.start()
    first, second, third = stage.event(), stage.event(), stage.event()
    now = time.time()
    stage.put(stage.anne.decide(first, iat=now - 1), stage.boris.decide(first, "hold"))
    stage.put(stage.boris.decide(second, "hold"))
    stage.put(stage.anne.decide(second, iat=now - 1))
    stage.put(stage.boris.decide(third, "hold", iat=now), stage.anne.decide(third, iat=now))
    control = stage.control()
    assert stage.posted == only(control)
    stage.end()


def test_nothing_of_a_revoked_key_is_posted_and_everything_else_is(stage):
    ways = ("removed", "replaced", "reloaded", "restarted")
    removed, replaced, _, restarted = signers = [stage.signer(way) for way in ways]
    stage.start(stage.anne, *signers)
    switch = stage.agent.state / "approvals.disabled"
    switch.touch()
    records = {signer: stage.event() for signer in (stage.anne, *signers)}
    stage.put(*(signer.decide(record) for signer, record in records.items()))
    stage.wait(lambda: stage.agent.out.read_text().count('"approval_failed"') >= len(records))
    stage.reload(stage.anne, removed, replaced, restarted)
    assert stage.agent.stop() == 0
    stage.configure(stage.anne, removed, replaced)
    stage.restart()
    removed.public_key_file.unlink()
    replaced.public_key_file.write_bytes(stage.signer("mallory").public_pem)
    switch.unlink()
    stage.wait_posted(records[stage.anne])
    control = stage.control()
    assert stage.posted == only(records[stage.anne], control)
    stage.end()


def test_an_approval_by_one_is_not_posted_once_two_are_required(stage):
    stage.start()
    switch = stage.agent.state / "approvals.disabled"
    switch.touch()
    alone, together = stage.event(), stage.event()
    stage.put(stage.anne.decide(alone))
    stage.wait(lambda: '"approval_failed"' in stage.agent.out.read_text())
    stage.reload(required_approvals=2)
    switch.unlink()
    stage.put(stage.anne.decide(together), stage.boris.decide(together))
    stage.wait_posted(together)
    assert stage.posted == only(together)
    stage.end()


def test_nothing_is_posted_for_a_portal_that_is_no_longer_configured(stage):
    stage.start()
    switch = stage.agent.state / "approvals.disabled"
    switch.touch()
    orphan = stage.event()
    stage.put(stage.anne.decide(orphan))
    stage.wait(lambda: '"approval_failed"' in stage.agent.out.read_text())
    stage.agent.configure(stage.azure.endpoint, "[approval]\n" + RULE + 'event_types = ["Reboot"]\n')
    stage.reload_file()
    switch.unlink()
    control = stage.event(event_type="Reboot")
    stage.wait_posted(control)
    assert stage.posted == only(control)
    stage.end()


@pytest.mark.parametrize("age_seconds", [0.0, 3600.0, 10_000.0], ids=["now", "before the database", "expired"])
def test_a_hold_that_comes_before_its_event_stops_the_rules(stage, age_seconds):
    stage.start(rules=RULE)
    held = stage.hidden()
    decided_at = time.time() - age_seconds
    stage.put(stage.anne.decide(held, "hold", iat=decided_at, exp=decided_at + 7200))
    stage.azure.world.replace_document(None)
    control = stage.event()
    stage.wait_posted(control)
    assert stage.posted == only(control)
    stage.end()


def test_a_hold_stays_when_the_event_changes(stage):
    stage.start(rules=RULE)
    held = stage.hidden(duration_seconds=5)
    stage.put(stage.anne.decide(held, "hold"))
    stage.show(held)
    for change in ({"notice_seconds": 3660}, {"duration_seconds": 9}, {"resources": ("vm_0",)}):
        stage.azure.world.update(held["event"]["event_id"], **change)
        stage.wait_for_polls(3)
    control = stage.event()
    stage.wait_posted(control)
    assert stage.posted == only(control)
    stage.put(stage.anne.decide(stage.record(held["event"]["event_id"])))
    stage.wait_posted(held)
    stage.end()


@pytest.mark.parametrize("what", ["lost", "damaged", "lost while it runs"])
def test_a_hold_outlives_the_database(stage, what):
    stage.start(rules=RULE)
    held = stage.hidden()
    stage.put(stage.anne.decide(held, "hold"))
    stage.show(held)
    stage.wait_for_polls(2)
    if what != "lost while it runs":
        stage.agent.kill()
    delete_outbox(stage, damaged=what == "damaged")
    if what != "lost while it runs":
        stage.restart()
    stage.wait_for_polls(3)
    control = stage.event()
    stage.wait_posted(control)
    assert stage.posted == only(control)
    stage.end()


# Valid approvals, of which none may be lost.


def test_an_approval_that_comes_before_its_event_waits_for_it(stage):
    stage.start()
    early = stage.hidden()
    stage.put(stage.anne.decide(early))
    stage.wait_for_polls(3)
    stage.azure.world.replace_document(None)
    stage.wait_posted(early)
    assert stage.posted == only(early)
    stage.end()


@pytest.mark.parametrize(
    "content", [b"", b"-----BEGIN PUBLIC KEY-----\nMCow", None], ids=["empty", "half", "not there"]
)
@pytest.mark.parametrize("decision", ["approve", "hold"])
def test_a_decision_that_comes_while_its_key_is_being_written_counts(stage, content, decision):
    stage.start(rules=RULE if decision == "hold" else "")
    record = stage.hidden()
    file = stage.boris.public_key_file
    file.unlink() if content is None else file.write_bytes(content)
    stage.put(stage.boris.decide(record, decision))
    stage.wait_for_polls(2)
    stage.boris.publish()
    stage.wait_for_polls(8)
    stage.azure.world.replace_document(None)
    stage.wait_for_polls(3)
    if decision == "approve":
        stage.wait_posted(record)
        assert stage.posted == only(record)
    else:
        control = stage.event()
        stage.wait_posted(control)
        assert stage.posted == only(control)
    stage.end()


def test_no_approval_is_lost_to_an_empty_answer_that_nobody_believes(stage):
    stage.start()
    records = [stage.event() for _ in range(6)]
    for number, record in enumerate(records):
        stage.azure.world.set_fault(Fault(kind="wrong_type", body=NOTHING, method="GET", count=1))
        time.sleep(number * 0.04)
        stage.put(stage.anne.decide(record))
        stage.wait_posted(record)
    assert stage.posted == only(*records)
    stage.end()


def test_no_approval_is_lost_among_a_thousand_decisions_at_once(stage):
    stage.start()
    noisy, *records = [stage.event() for _ in range(13)]
    filler = "x" * 1_000
    noise = [stage.anne.decide(noisy, "hold", filler=filler) for _ in range(1_000)]
    good = [stage.boris.decide(record) for record in records]
    stage.put(*noise[:500], *good[:6], *noise[500:], *good[6:])
    stage.wait_posted(*records)
    assert stage.posted == only(*records)
    stage.end()


@pytest.mark.parametrize("kills", [5, pytest.param(145, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_no_approval_is_lost_or_invented_by_kills(stage, kills):
    chance, mallory = random.Random(kills), stage.signer("mallory")
    stage.start()
    approved = [stage.event()]
    for _ in range(kills):
        stage.portal.put(stage.vm_id, stage.anne.decide(approved[-1]), mallory.decide(stage.event(is_seen=False)))
        time.sleep(chance.choice([0.0, 0.01, 0.05, chance.uniform(0, 0.5)]))
        stage.agent.kill()
        stage.restart()
        approved.append(stage.event())
    stage.put(stage.anne.decide(approved[-1]))
    stage.wait_posted(*approved)
    assert set(stage.posted) == set(only(*approved))
    stage.end()


def test_a_clock_that_was_a_day_ahead_at_the_first_start_costs_no_approval(stage):
    stage.start()
    stage.control()
    assert stage.agent.stop() == 0
    (file,) = stage.agent.state.glob("outbox-*.db")
    with closing(sqlite3.connect(file)) as database, database:
        [(made_at,)] = database.execute("SELECT value FROM meta WHERE key = 'created_at'")
        tomorrow = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 86_400))
        database.execute("UPDATE meta SET value = ? WHERE key = 'created_at'", (tomorrow + made_at[19:],))
    stage.restart()
    stage.control()
    stage.end()


def test_what_the_page_allows_is_followed(stage):
    stage.start()
    anne, boris = stage.anne, stage.boris
    plain, named_alike, in_capitals, cut = [stage.event() for _ in range(4)]
    elsewhere = stage.event(resources=("vm_7",), is_seen=False)
    records = [plain, named_alike, in_capitals, cut, elsewhere]
    claims = anne.claims(plain)
    stage.put(
        anne.sign(json.dumps({**claims, "nbf": None, "reason": None, "ticket": ["x"]}).encode()),
        boris.decide(named_alike, jti=claims["jti"]),
        anne.decide(elsewhere),
        anne.decide(in_capitals, aud=stage.vm_id.upper()),
        anne.decide(cut, reason="cut \ud83d", **{"\ud83d": 1}),
    )
    stage.wait_posted(*records)
    assert stage.posted == only(*records)
    stage.end()


def test_the_decisions_of_an_answer_with_a_lower_index_count(stage):
    stage.start()
    stage.control()
    record = stage.event()
    stage.portal.answer_next(2, stage.anne.decide(record))
    stage.wait_posted(record)
    stage.control()
    stage.end()


def test_an_approval_that_comes_before_its_time_waits_for_it(stage):
    stage.start()
    early = stage.event()
    stage.put(stage.anne.decide(early, nbf=time.time() + 63))  # a VM takes it from 60 seconds before
    control = stage.control(stage.boris)
    stage.wait_posted(early)
    assert stage.posted == only(control, early)
    stage.end()


def test_a_portal_that_lost_its_state_is_followed_again(stage):
    stage.start()
    stage.control()
    stage.portal.lose()
    stage.control()
    stage.control(stage.boris)
    stage.end()


def test_no_approval_is_lost_with_a_database_that_is_lost_while_the_agent_runs(stage):
    stage.start()
    first = stage.control()
    delete_outbox(stage)
    stage.azure.world.update(first["event"]["event_id"], duration_seconds=9)
    control = stage.control()
    assert stage.posted == only(first, control)
    stage.end()
