"""The digest of an event: a change of any signed field changes the digest."""

import hashlib
import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.approval.digest import canonical_json, digest
from bridge.events.event import ScheduledEvent

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "digests.json").read_text(encoding="ascii"))["cases"]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
maybe = st.none() | texts
events = st.builds(
    ScheduledEvent,
    event_id=maybe,
    event_type=maybe,
    event_status=texts,
    resources=st.none() | st.lists(texts, max_size=5).map(tuple),
    not_before_raw=maybe,
    description=maybe,
    event_source=maybe,
    duration_seconds=st.none() | st.integers(0, 2**63 - 1),
    extra=st.dictionaries(texts, texts, max_size=2),
)
SIGNED = ("event_id", "event_type", "event_source", "duration_seconds", "resources", "not_before_raw")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_digest_matches_the_vectors(case):
    event = msgspec.convert({"event_status": "Scheduled", **case["event"]}, ScheduledEvent)

    assert canonical_json(event).decode() == case["canonical_json"]
    assert digest(event) == case["sha256"] == hashlib.sha256(case["canonical_json"].encode()).hexdigest()


@given(events)
def test_canonical_json_contains_exactly_six_members(event):
    assert json.loads(canonical_json(event), parse_int=float) == {
        "DurationInSeconds": None if event.duration_seconds is None else float(event.duration_seconds),
        "EventId": event.event_id,
        "EventSource": event.event_source,
        "EventType": event.event_type,
        "NotBefore": event.not_before_raw,
        "Resources": None
        if event.resources is None
        else sorted(set(event.resources), key=lambda name: name.encode("utf-16-be")),
    }


@given(events, st.sampled_from(SIGNED))
def test_a_change_of_any_signed_field_changes_the_digest(event, name):
    value = {"duration_seconds": 77, "resources": ("another",)}.get(name, "another")
    changed = msgspec.structs.replace(event, **{name: value})

    assert (digest(changed) == digest(event)) == (getattr(event, name) == value)


@given(events, st.data())
def test_resource_order_duplicates_and_unsigned_fields_keep_the_digest(event, data):
    names = event.resources
    if names:
        names = tuple(data.draw(st.permutations([*names, data.draw(st.sampled_from(names))])))
    other = msgspec.structs.replace(event, resources=names, event_status="Started", description="other", extra={"a": 1})

    assert digest(other) == digest(event)


def _node():
    try:
        return subprocess.run(["node", "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@pytest.mark.interop
@pytest.mark.skipif(_node() is None, reason="needs node")
def test_javascript_canonicalises_every_vector_to_the_same_bytes():
    script = """
    const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
    console.log(JSON.stringify(cases.map(({event}) => JSON.stringify({
      DurationInSeconds: event.duration_seconds, EventId: event.event_id, EventSource: event.event_source,
      EventType: event.event_type, NotBefore: event.not_before_raw,
      Resources: event.resources && [...new Set(event.resources)].sort()}))));
    """
    answer = subprocess.run(
        ["node", "-e", script], input=json.dumps(CASES), capture_output=True, text=True, check=True, timeout=60
    )

    assert json.loads(answer.stdout) == [case["canonical_json"] for case in CASES]
