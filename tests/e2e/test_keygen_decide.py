"""The output of `keygen` and `decide`, which an agent must accept."""

import json
import sys
from datetime import datetime, timedelta, timezone

import fork_server
import pytest

from bridge.approval.decision_token import verify
from bridge.approval.digest import digest
from bridge.config.loader import read
from bridge.config.trusted_keys import TrustedKey
from bridge.events.event import VmIdentity, encode
from bridge.events.record import Transition, Verdict
from bridge.testing.records import VM, sample_event, sample_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCUMENT = {
    "DocumentIncarnation": 7,
    "Events": [
        {
            "EventId": event_id,
            "EventType": "Freeze",
            "EventStatus": "Scheduled",
            "ResourceType": "VirtualMachine",
            "Resources": ["vm-a", "vm-b"],
            "NotBefore": "Fri, 20 Nov 2026 11:15:00 GMT",
        }
        for event_id in ("ONE", "TWO")
    ],
}


@pytest.fixture
def call(agent_env, tmp_path):
    def call(*arguments, stdin=b""):
        return fork_server.call(*arguments, stdin=stdin, env=agent_env, cwd=tmp_path)

    return call


@pytest.fixture
def decide(call, tmp_path):
    """Sign with a new key. `options` replace the options of an approval, and None removes an option."""
    key = tmp_path / "night.key"
    assert call("keygen", key)[0] == 0

    def decide(content, **options):
        values = {"key": key, "kid": "night", "approver": "portal", "event_file": "-", "decision": "approve"} | options
        arguments = [(f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None]
        return call("decide", *(text for pair in arguments for text in pair), stdin=content)

    return decide


def _accepted(token, tmp_path, *, vm_id=VM.vm_id):
    now = datetime.now(timezone.utc)
    trusted = TrustedKey(kid="night", approver="portal", public_key_file=tmp_path / "night.key.pub")
    return verify(token.strip(), keys=[trusted], audience=vm_id, now=now, created_at=now - timedelta(hours=1))


def test_keygen_prints_a_valid_key_table_for_the_configuration(call, tmp_path):
    code, out, err = call("keygen", tmp_path / "decisions.key", "--kid", "ops-2026", "--approver", "night shift")
    assert (code, err) == (0, "")
    remote = read(tomllib.loads(f'[approval.remote]\nurl = "https://portal.example.net"\n{out}')).approval.remote
    [key] = remote.keys
    assert (key.kid, key.approver) == ("ops-2026", "night shift")
    assert key.public_key_file == str(tmp_path / "decisions.key.pub")
    assert str(tmp_path / "decisions.key") in out


@pytest.mark.parametrize("existing", ["my.key", "my.key.pub"])
def test_keygen_does_not_overwrite_existing_files(call, tmp_path, existing):
    (tmp_path / existing).write_text("precious")
    code, out, err = call("keygen", tmp_path / "my.key")
    assert (code, out) == (1, "")
    assert f"{existing} already exists" in err
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"


@pytest.mark.parametrize("arguments", [(), ("a.key", "--kid", "schlüssel"), ("a.key", "--approver", "a\nb")])
def test_keygen_with_invalid_arguments_writes_no_file(call, tmp_path, arguments):
    code, out, _ = call("keygen", *arguments)
    assert (code, out) == (2, "")
    assert list(tmp_path.iterdir()) == []


def test_decision_on_a_record_is_accepted_by_its_vm(decide, tmp_path):
    record = sample_record()
    code, out, err = decide(encode(record), reason="drained by the night shift", valid_seconds=600)
    assert code == 0, err
    decision = _accepted(out, tmp_path)
    assert decision.verdict is Verdict.APPROVE
    assert (decision.event_id, decision.event_digest) == (record.event.event_id, digest(record.event))
    assert decision.reason == "drained by the night shift"
    assert decision.expires_at - decision.issued_at == timedelta(seconds=600)
    assert out.count("\n") == 1
    for shown in ("approve until", "Freeze", "WestNO_0, WestNO_1", VM.vm_id):
        assert shown in err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_private_key_accessible_to_other_users_is_rejected(decide, tmp_path, mode):
    key = tmp_path / "night.key"
    key.chmod(mode)
    code, out, err = decide(encode(sample_record()))
    assert (code, out) == (1, "")
    assert f"Other users can access the private key file {key}, because its mode is {mode:04o}" in err
    key.chmod(0o400)
    assert decide(encode(sample_record()))[0] == 0


def test_decision_uses_the_newest_record_of_the_event(decide, tmp_path):
    later = sample_event(not_before_raw="Fri, 20 Nov 2026 12:15:00 GMT")
    other = sample_event(event_id="OTHER")
    records = [
        sample_record(2, transition=Transition.UPDATED, event=later),
        sample_record(1),
        sample_record(3, event=other),
        sample_record(4, transition=Transition.HEARTBEAT, event=None),
    ]
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    code, out, err = decide(b"", event_file=path, event_id=later.event_id, decision="hold")
    assert code == 0, err
    assert _accepted(out, tmp_path).event_digest == digest(later)
    code, _, err = decide(b"", event_file=path)
    assert code == 1
    assert "The file has 2 events. Select an event with --event-id." in err


def test_hold_for_another_vm_of_the_event_has_the_audience_of_that_vm(decide, tmp_path):
    code, out, _ = decide(encode(sample_record()), vm_id="OTHER-VM", decision="hold")
    assert code == 0
    assert _accepted(out, tmp_path, vm_id="other-vm").verdict is Verdict.HOLD


def test_decision_on_an_imds_document_requires_a_vm_id(decide, tmp_path):
    body = json.dumps(DOCUMENT, indent=2).encode()
    code, out, err = decide(body, event_id="TWO", vm_id=VM.vm_id)
    assert code == 0, err
    assert _accepted(out, tmp_path).event_id == "TWO"
    assert decide(body, event_id="TWO")[0] == 2, "a document does not name its VM"


@pytest.mark.parametrize(
    "content",
    [
        encode(sample_record(transition=Transition.CANCELED)),
        encode(sample_record(event=sample_event(event_status="Started"))),
    ],
)
def test_decision_on_an_event_that_is_not_scheduled_is_signed_with_a_warning(decide, content):
    code, out, err = decide(content)
    assert code == 0
    assert out
    assert "An agent that sees the same state refuses the decision" in err


@pytest.mark.parametrize(
    ("content", "options", "code", "sentence"),
    [
        (b"nonsense", {}, 1, "Line 1 of the file is not a transition record"),
        (b"", {}, 1, "is not a transition record"),
        (b'{"Events": 3}', {}, 1, "instead of a list of Events"),
        (encode(sample_record()), {"event_id": "NONE"}, 1, "The file has no event 'NONE'. It has: C7061BAC"),
        (encode(sample_record(event=None)), {}, 1, "none with an EventId"),
        (
            json.dumps({"Events": [DOCUMENT["Events"][0]] * 2}).encode(),
            {"event_id": "ONE", "vm_id": "x"},
            1,
            "two events with the same EventId",
        ),
        (
            encode(sample_record(1)) + b"\n" + encode(sample_record(1, vm=VmIdentity(vm_id="another"))),
            {},
            1,
            "records of 2 VMs for this event",
        ),
        (encode(sample_record()), {"valid_seconds": 90000}, 1, "cannot be valid for 90000.0 s"),
        (encode(sample_record()), {"valid_seconds": "nan"}, 1, "cannot be valid for nan s"),
        (encode(sample_record()), {"reason": "two\nlines"}, 1, "The reason must have at most 256"),
        (encode(sample_record()), {"key": "/nowhere/key"}, 1, "cannot be read: No such file"),
        (encode(sample_record()), {"event_file": "/nowhere/file"}, 2, "/nowhere/file"),
        (encode(sample_record()), {"decision": "maybe"}, 2, "--decision"),
        (encode(sample_record()), {"kid": None}, 2, "--kid"),
    ],
)
def test_invalid_input_prints_an_error_and_no_token(decide, content, options, code, sentence):
    done, out, err = decide(content, **options)
    assert (done, out) == (code, "")
    assert sentence in err
    assert "Traceback" not in err
