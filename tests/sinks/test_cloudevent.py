"""The CloudEvent of the webhook and eventhubs sinks: its attributes and its record."""

import json

import pytest

from bridge.sink import Transition, VmIdentity, encode
from bridge.testing.records import VM, sample_event, sample_record
from sinks.cloudevent import cloud_event_bytes


def decoded(record):
    return json.loads(cloud_event_bytes(record))


def test_data_contains_the_record_of_every_transition():
    for transition in Transition:
        record = sample_record(
            3, transition=transition, event=None if transition is Transition.HEARTBEAT else sample_event()
        )
        assert decoded(record)["data"] == json.loads(encode(record))


def test_sequence_sorts_as_text():
    texts = [decoded(sample_record(number))["sequence"] for number in (9, 10, 99, 100, 2**63)]
    assert texts == sorted(texts)


@pytest.mark.parametrize(
    ("vm", "source"),
    [
        (VM, VM.resource_id),
        (VmIdentity(name="WestNO_0"), "/vm/WestNO_0"),
        (VmIdentity(name="vm 1/\u00e4"), "/vm/vm%201%2F%C3%A4"),
        (VmIdentity(vm_id="f2a1c5d0"), "/vm/f2a1c5d0"),
        (VmIdentity(), "/vm/unknown"),
    ],
)
def test_source_is_the_resource_id_or_the_name(vm, source):
    assert decoded(sample_record(vm=vm))["source"] == source


def test_attribute_without_a_value_is_omitted():
    assert "subject" not in decoded(sample_record(event=None, transition=Transition.HEARTBEAT))
    assert "subject" not in decoded(sample_record(event=sample_event(event_id=None)))
