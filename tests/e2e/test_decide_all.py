"""`decide --all`: signs a decision for every VM of an event from one file of records."""

import json
from datetime import datetime, timezone

import fork_server
import msgspec
import pytest

from bridge.approval.decision_token import RefusedDecision, verify
from bridge.approval.digest import digest
from bridge.config.trusted_keys import TrustedKey
from bridge.events.event import VmIdentity, encode
from bridge.events.record import Approval, Transition, Verdict
from bridge.testing.records import sample_event, sample_record

LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.utc)
NAMES = ("vm_0", "vm_1", "vm_2")
EVENT = sample_event(resources=NAMES)
STARTED = sample_event(resources=NAMES, event_status="Started")


def vm(number, group="west"):
    return VmIdentity(
        name=f"vm_{number}",
        vm_id=f"7ef1d8a4-0c2b-4c7e-9a35-00000000000{number}",
        subscription_id="s",
        resource_group=group,
    )


def record(number, sequence=1, *, group="west", event=EVENT, stream="a", **fields):
    stream_id = f"0d3c2b1a-0000-4000-8000-0000000000{stream}{number}"
    return sample_record(sequence, vm=vm(number, group), event=event, stream_id=stream_id, **fields)


def lines(*records):
    return b"\n".join(map(encode, records)) + b"\n"


@pytest.fixture
def call(agent_env, tmp_path):
    def call(*arguments, stdin=b""):
        return fork_server.call(*arguments, stdin=stdin, env=agent_env, cwd=tmp_path)

    assert call("keygen", tmp_path / "night.key")[0] == 0
    return call


@pytest.fixture
def decide(call, tmp_path):
    """Decide for all of *records*; return the exit code, the claims by the number of the VM, and standard error."""
    key = TrustedKey(kid="night", approver="ops", public_key_file=tmp_path / "night.key.pub")

    def decide(content, *arguments, decision="approve"):
        code, out, err = call(
            *("decide", "--key", tmp_path / "night.key", "--kid", "night", "--approver", "ops", "--event-file", "-"),
            *("--decision", decision, "--all", *arguments),
            stdin=content,
        )
        claims = {}
        for token in out.splitlines():
            for number in range(10):
                try:
                    claims[number] = verify(
                        token,
                        keys=[key],
                        audience=vm(number).vm_id,
                        now=datetime.now(timezone.utc),
                        created_at=LONG_AGO,
                    )
                except RefusedDecision:  # The decision is for another VM.
                    continue
        assert len(claims) == len(out.splitlines())
        return code, claims, err

    return decide


def test_approval_is_signed_for_each_vm_with_the_event_version_of_that_vm(decide):
    other = msgspec.structs.replace(EVENT, not_before_raw="another time")
    code, claims, err = decide(
        lines(
            record(0, 1),
            record(1, 2, event=other, transition=Transition.UPDATED),
            record(1, 1),
            record(2, 1),
            record(2, 2, event=STARTED, transition=Transition.STARTED),
            record(3, 1),
            record(3, 2, transition=Transition.CANCELED),
        )
    )
    assert code == 0
    assert set(claims) == {0, 1}
    assert claims[0].event_digest == digest(EVENT)
    assert claims[1].event_digest == digest(other)
    assert {each.verdict for each in claims.values()} == {Verdict.APPROVE}
    assert len({each.decision_id for each in claims.values()}) == 2
    assert [line.partition(": ")[0].rpartition(" ")[2] for line in err.splitlines()] == [vm(0).vm_id, vm(1).vm_id]


def test_approval_records_do_not_change_the_event_version(decide):
    before = msgspec.structs.replace(EVENT, not_before_raw="before")
    refused = Approval(source="portal", result="event_changed")
    code, claims, _ = decide(
        lines(record(0, 1), record(0, 2, event=before, transition=Transition.APPROVAL_REFUSED, approval=refused))
    )
    assert code == 0
    assert claims[0].event_digest == digest(EVENT)


def test_cloudevents_are_accepted_as_records(decide):
    content = b"\n".join(
        json.dumps({"specversion": "1.0", "id": each.id, "data": json.loads(encode(each))}).encode()
        for each in (record(0), record(1))
    )
    code, claims, _ = decide(content)
    assert (code, set(claims)) == (0, {0, 1})


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"", (), "is not a transition record"),
        (lines(record(0), record(1, event=sample_event(event_id="E-2"))), (), "The file has 2 events. Select an event"),
        (lines(record(0)), ("--event-id", "E-9"), "The file has no event 'E-9'."),
        (lines(record(0), record(0, 2, transition=Transition.ENDED)), (), "is not Scheduled for any VM in the file"),
        (lines(record(0, event=STARTED, transition=Transition.STARTED)), (), "is not Scheduled for any VM in the file"),
        (lines(record(0)) + b"{}\n", (), "Line 2 of the file is not a transition record"),
        (lines(record(0)) + b"{\n", (), "Line 2 of the file is not a transition record"),
    ],
)
def test_ambiguous_or_invalid_file_signs_nothing(decide, content, arguments, message):
    code, claims, err = decide(content, *arguments)
    assert (code, claims) == (1, {})
    assert message in err


def test_hold_is_signed_for_every_vm_with_an_open_event(decide):
    elsewhere = sample_event(event_id="E-2", resources=("vm_5",))
    code, claims, err = decide(
        lines(
            record(0),
            record(1, event=STARTED, transition=Transition.STARTED),
            record(4, event=elsewhere),
        ),
        *("--event-id", EVENT.event_id),
        decision="hold",
    )
    assert code == 0
    assert set(claims) == {0, 1}
    assert {each.event_id for each in claims.values()} == {EVENT.event_id}
    assert {each.verdict for each in claims.values()} == {Verdict.HOLD}
    assert "No decision for vm_2: the file has no record of this VM." in err


def test_records_of_several_streams_are_ordered_and_missing_endings_inferred(decide):
    later = msgspec.structs.replace(EVENT, not_before_raw="later")
    code, claims, _ = decide(
        lines(
            record(0, 2, stream="b", event=later, transition=Transition.UPDATED),
            record(0, 1, stream="a"),
            record(1, 1, stream="a"),
            record(1, 9, stream="b", transition=Transition.HEARTBEAT, event=None, active_event_ids=()),
        ),
    )
    assert (code, set(claims)) == (0, {0})
    assert claims[0].event_digest == digest(later)


def test_all_and_vm_id_are_mutually_exclusive(decide):
    code, _, err = decide(lines(record(0)), "--vm-id", vm(0).vm_id)
    assert (code, "Use either --all or --vm-id, not both." in err) == (2, True)
