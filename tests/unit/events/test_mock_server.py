"""Microsoft's mock server, which draws a new EventId at each status: what the tracker makes of its twelve scenarios."""

import json
from datetime import timedelta

import pytest
from document_kit import NOW
from mock_server import SCENARIOS, VM, MockServer

from bridge.clock import Instant
from bridge.events.tracker import DocumentTracker
from bridge.imds.document import parse_document


def polled(scenario):
    """Return (transition, evidence, status shown) of each record of *scenario*, polled once a second."""
    tracker = DocumentTracker(None, last_good_at=None, booted=False, gap_seconds=10.0)
    told, second = [], 0
    for status, seconds, body in MockServer().play(scenario, NOW):
        for _ in range(seconds):
            moment = Instant(wall=NOW + timedelta(seconds=second), monotonic=float(second))
            update = tracker.observe(parse_document(json.dumps(body).encode()), moment, vm_name=VM)
            tracker.commit(update)
            told += [(change.transition.value, change.evidence.value, status) for change in update.changes]
            second += 1
    return told


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_new_event_id_at_each_status_is_no_cancellation(scenario):
    announced = ("scheduled", "observed", "Scheduled")
    if scenario.is_canceled:
        assert polled(scenario) == [announced, ("canceled", "inferred", "Over")]
        return
    assert polled(scenario) == [
        announced,
        ("ended", "unknown", "Started"),
        ("started", "observed", "Started"),
        ("completed", "observed", "Over"),
    ]
