"""The ids of records: the arrays that they hash, and the facts that they ignore."""

import hashlib
import json
import uuid

import pytest
from document_kit import event

from bridge.events.record import NAMESPACE, Transition, json_schema, record_id, repeat_key, transition_key

EVENT = event(description="\u2603", resources=("b", "a", "b"), not_before=None)
AS_JSON = {
    "description": "\u2603",
    "duration_seconds": None,
    "event_id": "A-1",
    "event_source": None,
    "event_status": "Scheduled",
    "event_type": "Reboot",
    "extra": {},
    "not_before": None,
    "not_before_raw": None,
    "resource_type": None,
    "resources": ["a", "b"],
}


def compact(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def own_id(shown=EVENT, *, transition=Transition.SCHEDULED, n=0, outcome=None):
    return record_id(vm_key="vm", event_key="A-1", transition=transition, event=shown, n=n, outcome=outcome)


@pytest.mark.parametrize("n", [0, 3])
def test_record_id_is_the_uuid5_of_the_specified_array(n):
    name = compact([2, "vm", "A-1", "scheduled", AS_JSON, n])
    assert own_id(n=n) == str(uuid.uuid5(NAMESPACE, name))


def test_the_id_of_an_outcome_ends_with_the_decision_and_the_result():
    name = compact([2, "vm", "A-1", "approved", AS_JSON, 0, "jti", "accepted"])
    found = own_id(transition=Transition.APPROVED, outcome=("jti", "accepted"))
    assert found == str(uuid.uuid5(NAMESPACE, name))


def test_transition_key_is_the_sha256_of_the_specified_array():
    name = compact(["A-1", "scheduled", AS_JSON, 2])
    assert transition_key("A-1", Transition.SCHEDULED, EVENT, n=2) == hashlib.sha256(name.encode()).hexdigest()


def test_a_record_without_an_event_has_an_id():
    name = compact([2, "vm", "A-1", "approval_refused", None, 0])
    assert own_id(None, transition=Transition.APPROVAL_REFUSED) == str(uuid.uuid5(NAMESPACE, name))


def test_n_and_every_field_of_the_event_change_the_ids():
    others = [event(), event("Started"), event(description="x"), event(extra={"X": 1})]
    found = {own_id(one, n=n) for one in others for n in range(3)}
    keys = {transition_key("A-1", Transition.SCHEDULED, one, n=n) for one in others for n in range(3)}
    assert len(found) == len(keys) == 12


def test_the_order_of_resources_changes_neither_ids_nor_the_repeat_key():
    one, other = event(resources=("a", "b")), event(resources=("b", "a"))
    assert own_id(one) == own_id(other)
    assert repeat_key(Transition.UPDATED, one) == repeat_key(Transition.UPDATED, other)


def test_a_repeat_key_is_short_and_differs_by_transition_and_content():
    keys = {
        repeat_key(transition, shown)
        for transition in (Transition.SCHEDULED, Transition.UPDATED)
        for shown in (None, event(), event(description="x"))
    }
    assert len(keys) == 6
    assert {len(key) for key in keys} == {16}


def test_the_schema_has_the_list_of_open_events_after_the_sequence():
    fields = list(json_schema()["$defs"]["TransitionRecord"]["properties"])
    assert fields[4:6] == ["sequence", "active_event_ids"]
