"""The tracker with the twelve scenarios of Microsoft's mock server, which changes the EventId at each status."""

import json

import pytest
from document_kit import NOW, Agent
from mock_server import SCENARIOS, VM, MockServer

from bridge.events.event import Document
from bridge.imds.document import parse_document

CONFIRMED_AFTER = 5


def polled(scenario):
    """Return (transition, evidence, status shown) of each record of *scenario*, polled once a second."""
    agent, statuses = Agent(Document()), []
    for status, seconds, body in MockServer().play(scenario, NOW):
        for _ in range(max(seconds, CONFIRMED_AFTER)):
            agent.observe(parse_document(json.dumps(body).encode()), len(statuses), vm_name=VM)
            statuses.append(status)
    return [(transition, evidence, statuses[second]) for second, transition, evidence in agent.seen]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_new_event_id_at_each_status_is_not_a_cancellation(scenario):
    announced = ("scheduled", "observed", "Scheduled")
    if scenario.is_canceled:
        assert polled(scenario) == [announced, ("canceled", "inferred", "Over")]
        return
    assert polled(scenario) == [
        announced,
        ("started", "observed", "Started"),
        ("ended", "unknown", "Started"),
        ("completed", "observed", "Over"),
    ]
