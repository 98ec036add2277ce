"""A silent portal does not delay the poll. The tests of the portal poller cover each fault."""

import statistics
from itertools import pairwise

from portal_stub import PortalStub

from bridge.approval.portal_client import GRACE_SECONDS
from bridge.testing import EventSpec, Simulator

INTERVAL_SECONDS = 0.5
#: The duration of a request to a silent portal. A poll that waits for the request is delayed by this time.
PORTAL_SECONDS = 1 + GRACE_SECONDS


def poll_times(azure):
    return [request.monotonic_seconds for request in azure.requests if "scheduledevents" in request.path]


def test_silent_portal_delays_neither_poll_nor_sink(agent, tmp_path):
    with Simulator(vms=["vm_0"], rate_limit=False) as azure, PortalStub(tmp_path / "portal") as portal:
        agent.configure(azure.endpoint, portal.toml(wait_seconds=1), poll_interval_seconds=INTERVAL_SECONDS)
        portal.strike("silence")
        agent.start()
        agent.wait_for(lambda: portal.requests)
        before = len(poll_times(azure))
        azure.world.add_event(EventSpec(event_type="Freeze", resources=("vm_0",), notice_seconds=3600))
        agent.wait_for(lambda: agent.out.exists() and agent.transitions == [("scheduled", "observed")])
        agent.wait_for(lambda: len(poll_times(azure)) >= before + 7)
        gaps = [later - earlier for earlier, later in pairwise(poll_times(azure)[before:])]
        assert statistics.median(gaps) <= 2 * INTERVAL_SECONDS  # one gap may be longer on a busy machine
        assert max(gaps) < PORTAL_SECONDS / 2
        assert agent.stop() == 0
    assert "Traceback" not in agent.log
