"""The agent refreshes active alerts at the destination, but not alerts of events that ended during its downtime."""

from __future__ import annotations

import json

import pytest

from bridge.testing import EventSpec, Simulator
from bridge.testing.http_contract import HttpPeer


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def peer():
    with HttpPeer() as each:
        yield each


def received(peer, start=0):
    """Return (EventId, transition) of each request."""
    alerts = [json.loads(request.body)[-1] for request in peer.requests[start:]]
    return [(alert["labels"]["event_id"], alert["annotations"]["transition"]) for alert in alerts]


def test_event_that_ended_while_the_agent_was_down_is_not_refreshed(agent, azure, peer):
    gone = azure.world.add_event(EventSpec(event_type="Freeze", notice_seconds=900))
    stays = azure.world.add_event(EventSpec(event_type="Reboot", notice_seconds=900))
    agent.configure(
        azure.endpoint,
        f'[[sinks]]\ntype = "webhook"\nformat = "alertmanager"\nurl = "http://{peer.address.authority}"\n'
        "refresh_seconds = 0.3\n",
    )
    agent.start()
    agent.wait_for(
        lambda: received(peer).count((gone, "scheduled")) > 1 and received(peer).count((stays, "scheduled")) > 1
    )
    assert agent.stop() == 0
    azure.world.cancel(gone)
    before = len(peer.requests)
    agent.start()
    endings = {(gone, "canceled"), (gone, "ended")}
    agent.wait_for(lambda: endings & set(received(peer, before)))
    ended_at = next(n for n, sent in enumerate(received(peer)) if sent in endings) + 1
    agent.wait_for(lambda: received(peer, ended_at).count((stays, "scheduled")) > 2)
    assert gone not in [event_id for event_id, _ in received(peer, ended_at)]
    assert agent.stop() == 0
