"""Whatever the portal does, the poll keeps its beat; a decision waits for the portal to come back.

One fault of each kind: what the agent makes of each status and body is tested at the portal's poller.
"""

import statistics
import time
from itertools import pairwise

import pytest
from portal_stub import PortalStub

from bridge.approval.portal_client import GRACE_SECONDS
from bridge.events.record import decode_record
from bridge.testing import EventSpec, Simulator

INTERVAL_SECONDS = 0.5
#: How long a request to a silent portal lasts here; a poll that waited for one would be so late.
PORTAL_SECONDS = 1 + GRACE_SECONDS
FAULTS = {
    "silence": {"kind": "silence"},
}


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


def polls(azure, since):
    times = [request.monotonic_seconds for request in azure.requests if "scheduledevents" in request.path]
    return [moment for moment in times if moment >= since]


def decided(portal, record):
    portal.decide(record.event, vm_id=record.vm.vm_id, jti="d-1")


@pytest.mark.parametrize("fault", [*FAULTS, "down"])
def test_a_portal_in_trouble_delays_nothing_and_its_decision_counts_on_its_return(agent, azure, tmp_path, fault):
    with PortalStub(tmp_path / "portal") as portal:
        agent.configure(azure.endpoint, portal.toml(wait_seconds=1), poll_interval_seconds=INTERVAL_SECONDS)
        portal.down() if fault == "down" else portal.strike(**FAULTS[fault])
        agent.start()
        azure.world.add_event(EventSpec(event_type="Freeze", resources=("vm_0",), notice_seconds=3600))
        agent.wait_for(lambda: agent.out.exists() and agent.transitions == [("scheduled", "observed")])
        began = time.monotonic()
        decided(portal, decode_record(agent.out.read_bytes().splitlines()[0]))
        agent.wait_for(lambda: len(polls(azure, began)) >= 6)
        gaps = [after - before for before, after in pairwise(polls(azure, began))]
        assert statistics.median(gaps) <= 2 * INTERVAL_SECONDS  # one may be longer on a busy machine
        assert max(gaps) < PORTAL_SECONDS / 2
        assert not azure.world.approvals
        portal.up() if fault == "down" else portal.heal()
        agent.wait_for(lambda: "started" in agent.out.read_text(), timeout_seconds=60)
        assert [transition for transition, _ in agent.transitions][:3] == ["scheduled", "approved", "started"]
        assert agent.stop() == 0
    assert "Traceback" not in agent.log
