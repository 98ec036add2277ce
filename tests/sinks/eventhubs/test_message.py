"""The partition key and the properties of a message."""

from bridge.sink import Transition, VmIdentity
from bridge.testing.records import sample_event, sample_record
from sinks.eventhubs.message import partition_key, properties


def test_partition_key_is_the_event_id_within_the_event_hubs_limit():
    assert partition_key(sample_record(event=sample_event(event_id="A-1"))) == "A-1"
    names = tuple(f"vm-{n}" for n in range(99))
    nameless = sample_record(event=sample_event(event_id=None, resources=names))
    assert len(partition_key(nameless)) == 64
    assert (
        len(partition_key(sample_record(event=sample_event(event_id="")))) == 64
    )  # with "", records would have no key and no order


def test_unknown_properties_are_omitted():
    heartbeat = sample_record(event=None, transition=Transition.HEARTBEAT, vm=VmIdentity())
    assert properties(heartbeat) == {"transition": "heartbeat"}
