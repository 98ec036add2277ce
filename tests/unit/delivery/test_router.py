"""The sinks that get a record, by the filters of a [[sinks]] table."""

import msgspec
import pytest

from bridge.delivery.router import wants
from bridge.events.record import Approval, Transition
from bridge.sink import SinkConfig
from bridge.testing.records import sample_event, sample_record

ME = "vm_1"


def record(transition="scheduled", **fields):
    return sample_record(transition=Transition(transition), event=sample_event(**{"resources": (ME,), **fields}))


def record_without_event(transition):
    return sample_record(transition=Transition(transition), event=None)


def is_wanted(each, vm_name=ME, **filters):
    return wants(SinkConfig(name="s", **filters), each, vm_name)


@pytest.mark.parametrize(
    ("resources", "vm_name", "mine"),
    [
        ((ME,), ME, True),
        (("other", ME), ME, True),
        (("other",), ME, False),
        (("vm_10", "vm_"), ME, False),
        (("_VM_1",), ME, True),
        ((ME,), "_Vm_1", True),
        ((), ME, True),
        (None, ME, True),
        (("other",), None, True),
        (("other",), "", True),
    ],
)
def test_scope_mine_selects_events_of_this_vm_or_all_without_a_vm_name(resources, vm_name, mine):
    assert is_wanted(record(resources=resources), vm_name) is mine
    assert is_wanted(record(resources=resources), vm_name, scope="all")


def test_transition_filter_passes_only_matching_records():
    assert is_wanted(record(transition="started"), transitions=("started", "completed"))
    assert not is_wanted(record(transition="scheduled"), transitions=("started", "completed"))


def test_event_type_and_source_filters_pass_only_matching_records():
    assert is_wanted(record(event_type="Preempt"), event_types=("Preempt",))
    assert not is_wanted(record(event_type="Freeze"), event_types=("Preempt",))
    assert is_wanted(record(event_source="User"), event_sources=("User",))
    assert not is_wanted(record(event_source="Platform"), event_sources=("User",))


def test_event_of_unknown_type_or_source_passes_only_without_a_filter():
    assert is_wanted(record(event_type=None, event_source=None))
    assert not is_wanted(record(event_type=None), event_types=("Freeze",))
    assert not is_wanted(record(event_source=None), event_sources=("Platform",))


def test_refused_approval_without_an_event_ignores_only_event_filters():
    refused = record_without_event("approval_refused")
    assert is_wanted(refused, event_types=("Preempt",), event_sources=("User",))
    assert not is_wanted(refused, transitions=("started",))


def test_heartbeats_ignore_all_filters_except_their_own_setting():
    beat = record_without_event("heartbeat")
    assert not is_wanted(beat)
    assert not is_wanted(beat, scope="all")
    assert is_wanted(beat, heartbeat=True, transitions=("started",), event_types=("Freeze",))


FLEET = ("vm_0", "vm_1", "vm_2")


@pytest.mark.parametrize("transition", ["scheduled", "started", "updated", "completed", "canceled", "ended"])
def test_speak_first_sends_records_only_from_the_first_vm(transition):
    each = record(resources=FLEET, transition=transition)
    assert [name for name in FLEET if is_wanted(each, name, speak="first")] == ["vm_0"]
    assert [name for name in FLEET if is_wanted(each, name)] == list(FLEET)


@pytest.mark.parametrize(("resources", "vm_name"), [((), ME), (None, ME), (FLEET, None), (FLEET, "")])
def test_every_vm_sends_while_the_first_vm_is_unknown(resources, vm_name):
    assert is_wanted(record(resources=resources), vm_name, speak="first")


def test_outcome_of_an_approval_is_sent_by_the_approving_vm():
    approval = Approval(source="cli", result="accepted")
    outcome = msgspec.structs.replace(record(resources=FLEET, transition="approved"), approval=approval)
    assert is_wanted(outcome, "vm_2", speak="first")


def test_heartbeats_and_records_without_an_event_are_sent_by_every_vm():
    assert is_wanted(record_without_event("heartbeat"), "vm_2", speak="first", heartbeat=True)
    assert is_wanted(record_without_event("approval_refused"), "vm_2", speak="first")
