"""Attacks on approvals, and faults during approvals, with an agent process, a simulated Azure, and a minimal portal.

The portal is written from PROTOCOL.md. The tests expect no invalid approvals (forged, replayed, revoked, held, or for a
changed event) and no lost approvals (after kills, empty responses, a rebuilt database, an early arrival, an incomplete
key file, a thousand simultaneous decisions, or a wrong clock at the first start). Each test ends with a control: a
valid approval that must arrive. The control proves that the agent read the earlier decisions.
"""

import json
import random
import time

import pytest
from approval_stage import RULE, only
from forgeries import forgeries

# Invalid approvals.


def delete_outbox(stage, *, damaged=False):
    """Delete every file of the outbox. If *damaged*, overwrite the databases instead."""
    for file in stage.agent.state.glob("outbox-*"):
        if damaged and file.suffix == ".db":
            file.write_bytes(b"damaged" * 4096)
        else:
            file.unlink()


def test_forged_and_malformed_decisions_are_rejected(stage):
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


def test_replayed_and_redirected_decisions_are_rejected(stage):
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


@pytest.mark.parametrize("what", ["lost", "damaged", "lost while the agent runs"])
def test_hold_survives_loss_or_damage_of_the_database(stage, what):
    stage.start(rules=RULE)
    held = stage.hidden()
    stage.put(stage.anne.decide(held, "hold"))
    stage.show(held)
    stage.wait_for_polls(2)
    if what != "lost while the agent runs":
        stage.agent.kill()
    delete_outbox(stage, damaged=what == "damaged")
    if what != "lost while the agent runs":
        stage.restart()
    stage.wait_for_polls(3)
    control = stage.event()
    stage.wait_posted(control)
    assert stage.posted == only(control)
    stage.end()


# Valid approvals.


def test_approvals_among_a_thousand_simultaneous_decisions_are_posted(stage):
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
def test_kills_neither_lose_nor_forge_approvals(stage, kills):
    chance, mallory = random.Random(kills), stage.signer("mallory")
    stage.start()
    approved = [stage.event()]
    for _ in range(kills):
        stage.portal.put_all(stage.anne.decide(approved[-1]), mallory.decide(stage.event(is_seen=False)))
        time.sleep(chance.choice([0.0, 0.01, 0.05, chance.uniform(0, 0.5)]))
        stage.agent.kill()
        stage.restart()
        approved.append(stage.event())
    stage.put(stage.anne.decide(approved[-1]))
    stage.wait_posted(*approved)
    assert set(stage.posted) == set(only(*approved))
    stage.end()


def test_unusual_decisions_allowed_by_the_protocol_are_posted(stage):
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


def test_approvals_continue_after_the_database_of_a_running_agent_is_deleted(stage):
    stage.start()
    first = stage.control()
    delete_outbox(stage)
    stage.azure.world.update(first["event"]["event_id"], duration_seconds=9)
    control = stage.control()
    assert stage.posted == only(first, control)
    stage.end()
