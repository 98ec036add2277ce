"""However many decisions a key signs, the newest count, the outbox stays within its bounds, and no hold is lost."""

import json
import sqlite3
from contextlib import closing

import jwt
import pytest
from approver_kit import ANNE, BORIS, ApproverKit
from bridge.outbox.reader import OutboxFile
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from bridge.approval.decision_token import TOKEN_TYPE
from bridge.errors import ImdsStatus
from bridge.events.record import Approval, Transition
from bridge.outbox import approvals, meta
from bridge.outbox.approvals import ApprovalRecord
from bridge.outbox.database import used_bytes
from bridge.outbox.records import Observation

MAX_BYTES = 2**22
MOST_OPEN = 16
#: As many as an answer of 1 MiB may hold, of the longest.
IN_AN_ANSWER = 128


@pytest.fixture
def kit(tmp_path):
    made = ApproverKit(tmp_path)
    made.trust(("k1", ANNE), ("k2", BORIS))
    made.start(max_bytes=MAX_BYTES)
    made.wait(10)
    yield made
    made.close()


def open_decisions(kit):
    return kit.outbox.read(approvals.open_decisions).result()


def fill(kit):
    """Fill the outbox with records to the bound, as a sink does that is down for weeks."""
    refused = ApprovalRecord(
        transition=Transition.APPROVAL_REFUSED,
        event=None,
        approval=Approval(source="portal", reason="x" * 20_000, result="expired"),
    )
    for _ in range(3):
        kit.outbox.write(kit.outbox.records.append_outcomes, [refused] * 100, incarnation=1).result()
    assert kit.outbox.read(used_bytes).result() > 0.9 * MAX_BYTES


def padded(kit, token):
    """Return the decision in *token* with a claim that nobody knows, about as long as a decision may be."""
    claims = jwt.api_jws.decode_complete(token, options={"verify_signature": False})
    payload = json.dumps({**json.loads(claims["payload"]), "padding": "x" * 5_000}).encode()
    key = load_pem_private_key(kit.key("k1").read_bytes(), None)
    return jwt.api_jws.encode(payload, key, algorithm="EdDSA", headers={"kid": "k1", "typ": TOKEN_TYPE})


def flood(kit, count, *, event_ids=1, decision="hold"):
    """Send *count* decisions of the longest, in answers that are as large as an answer may be."""
    for start in range(0, count, IN_AN_ANSWER):
        numbers = range(start, min(start + IN_AN_ANSWER, count))
        events = [kit.event(f"E-{number % event_ids}") for number in numbers]
        kit.approver.receive(
            [
                padded(kit, kit.token(event, decision, after=number / 1000))
                for number, event in zip(numbers, events, strict=True)
            ]
        )
        assert kit.outbox.read(used_bytes).result() <= MAX_BYTES


def store_document(kit):
    """Store the document as the poll does before the approver hears of it."""
    observation = Observation(
        stream_id=kit.outbox.read(meta.load).result().stream_id,
        document=kit.document,
        changes=[],
        observed_at=kit.now(),
        incarnation=1,
        previous_incarnation=None,
        is_settled=True,
        boot_id="b",
    )
    kit.outbox.write(kit.outbox.records.append_observation, observation).result()


def test_of_a_thousand_holds_by_one_key_the_newest_sixteen_stay_open(kit):
    kit.see(kit.event("E-0"))
    tokens = [kit.token(kit.event("E-0"), "hold", after=number / 1000) for number in range(1_000)]
    kit.approver.receive(tokens)
    kit.turn()
    assert [each.issued_at for each in open_decisions(kit)] == sorted(each.issued_at for each in open_decisions(kit))
    assert len(open_decisions(kit)) == MOST_OPEN
    assert max(each.issued_at for each in open_decisions(kit)) == int((kit.now().timestamp() + 0.999) * 1e6)
    assert kit.outcomes == [("approval_refused", "superseded")]
    kit.offer(kit.token(kit.event("E-0"), kid="k2", approver=BORIS, after=0.5))
    assert kit.imds.posts == []
    kit.offer(kit.token(kit.event("E-0"), kid="k2", approver=BORIS, after=2))
    assert kit.imds.posts == [["E-0"]]


def test_the_newest_sixteen_count_in_whichever_order_they_come(kit):
    kit.see(kit.event("E-0"))
    tokens = [kit.token(kit.event("E-0"), "hold", after=number / 10) for number in range(40)]
    for number in range(0, 40, 10):
        kit.approver.receive(tokens[30 - number : 40 - number])
    first = kit.now().timestamp() + 2.4
    assert sorted(each.issued_at for each in open_decisions(kit)) == [
        pytest.approx((first + number / 10) * 1e6, abs=1) for number in range(MOST_OPEN)
    ]


def test_each_key_and_each_event_has_sixteen_of_its_own(kit):
    for event_id in ("E-0", "E-1"):
        for kid, approver in (("k1", ANNE), ("k2", BORIS)):
            kit.approver.receive(
                [
                    kit.token(kit.event(event_id), "hold", kid=kid, approver=approver, after=number / 10)
                    for number in range(20)
                ]
            )
    assert len(open_decisions(kit)) == 4 * MOST_OPEN


def test_a_hold_outlives_any_number_of_approvals_of_another_event(kit):
    kit.see(kit.event("E-0"))
    kit.offer(kit.token(kit.event("E-0"), "hold"))
    other = kit.event("E-0", not_before_raw="another time")
    kit.offer(*(kit.token(other, after=1 + number / 10) for number in range(50)))
    assert [each.verdict.value for each in open_decisions(kit) if each.state.value == "held"] == ["hold"]


def test_what_azure_is_being_told_outlives_any_number_of_approvals_by_the_same_key(kit):
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.see(kit.event("E-0"))
    kit.offer(kit.token(kit.event("E-0")))
    kit.offer(*(kit.token(kit.event("E-0"), after=number / 200) for number in range(1, 50)))
    kit.imds.answer = None
    kit.go(60, kit.event("E-0"))
    assert kit.outcomes == [
        ("approval_failed", "rejected"),
        ("approval_refused", "superseded"),
        ("approved", "accepted"),
    ] + [("approved", "already_approved")] * (len(kit.outcomes) - 3)
    assert kit.imds.posts[-1] == ["E-0"]


def test_an_outbox_full_of_records_stays_within_its_bound_while_holds_come(kit):
    fill(kit)
    kit.see(kit.event("E-0"))
    flood(kit, 1_500)
    kit.turn()
    assert len(open_decisions(kit)) == MOST_OPEN


def test_decisions_on_events_that_nobody_knows_fill_no_outbox_and_push_out_no_hold(kit):
    kit.see(kit.event("E-0"))
    store_document(kit)
    kit.offer(kit.token(kit.event("E-0"), "hold"))
    flood(kit, 1_200, event_ids=1_200, decision="approve")
    kit.go(2, kit.event("E-0"))
    flood(kit, 1_200, event_ids=1_200)
    kit.go(62, kit.event("E-0"))
    assert ("approval_refused", "no_room") in kit.outcomes
    assert any(each.event_id == "E-0" for each in open_decisions(kit))
    kit.offer(kit.token(kit.event("E-0"), kid="k2", approver=BORIS, after=-70))
    assert kit.imds.posts == []
    with closing(sqlite3.connect(kit.state / "outbox.db")) as connection:
        (size,) = connection.execute("SELECT SUM(pgsize) FROM dbstat WHERE name LIKE 'decision%'").fetchone()
    assert size <= MAX_BYTES / 2
    with OutboxFile(kit.state) as beside:
        assert len(beside.snapshot().decisions) < 1_200


# One key beside another.


@pytest.fixture
def small(tmp_path):
    """Return a kit with little room for decisions."""
    made = ApproverKit(tmp_path)
    made.trust(("k1", ANNE), ("k2", BORIS))
    made.start(max_bytes=2**20)
    made.wait(10)
    yield made
    made.close()


def flood_by_another_key(kit, decision):
    for part in range(12):
        events = [kit.event(f"X-{part}-{number}") for number in range(50)]
        kit.offer(*(kit.token(each, decision, kid="k2", approver=BORIS, reason="x" * 250) for each in events))


@pytest.mark.parametrize("decision", ["hold", "approve"])
def test_a_hold_that_waits_for_its_event_outlives_any_number_of_decisions_by_another_key(small, decision):
    small.see()
    small.offer(small.token(small.event(), "hold"))
    flood_by_another_key(small, decision)
    small.go(62, small.event())
    assert ("approval_refused", "no_room") in small.outcomes
    assert [each.event_id for each in open_decisions(small) if each.approver == ANNE] == ["E-1"]
    small.offer(small.token(small.event(), kid="k2", approver=BORIS, after=-70))
    assert small.imds.posts == []


def test_an_approval_that_was_refused_is_not_followed_after_any_number_of_decisions_by_another_key(small):
    small.imds.get_answer = ImdsStatus("Unavailable", status=503)
    small.see(small.event())
    store_document(small)
    token = small.token(small.event())
    small.offer(token)
    file = small.key("k1").with_name("k1.key.pub")
    content = file.read_bytes()
    file.unlink()
    small.go(2, small.event())
    assert small.outcomes == [("approval_refused", "unknown_key")]
    file.write_bytes(content)
    small.imds.get_answer = None
    flood_by_another_key(small, "hold")
    small.offer(token)  # as a portal gives it again after a restart
    small.go(3, small.event())
    assert small.imds.posts == []
