"""The loops that /healthz watches, apart from the poll and the sinks: the approver and the portal poller."""

from __future__ import annotations

import json
import threading
import time

import pytest
from approver_kit import ApproverKit

from bridge.agent.agent import Agent
from bridge.approval.portal_client import PortalClient
from bridge.approval.portal_poller import PortalPoller
from bridge.clock import Clock
from bridge.config.approval import KeySettings, RemoteSettings, RuleSettings
from bridge.config.loader import read
from bridge.errors import ImdsUnreachable
from bridge.testing import Simulator
from bridge.testing.http_peer import HttpPeer

PATIENCE_SECONDS = 20.0
LONG_SECONDS = 3_600.0


class Time:
    """The monotonic clock, which a test can let go on."""

    def __init__(self):
        self.lead_seconds = 0.0

    def monotonic(self):
        return time.monotonic() + self.lead_seconds


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def until(condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "It did not happen in time."
        time.sleep(0.005)


def is_stuck_until_released(loop_watch, clock, gate):
    """Assert that the loop, hanging at *gate*, is late after an hour, not after a minute, and not once it goes on."""
    assert loop_watch.late_seconds == 0
    clock.lead_seconds += 60
    assert loop_watch.late_seconds == 0
    clock.lead_seconds += LONG_SECONDS
    assert loop_watch.late_seconds > LONG_SECONDS / 2
    gate.set()
    until(lambda: loop_watch.late_seconds == 0)


@pytest.fixture
def portal():
    with HttpPeer() as portal:
        yield portal


@pytest.fixture
def channel(portal, clock, gate):
    """A way to the portal whose reader hangs at the gate; it waits for nothing between two requests."""
    keys = (KeySettings(kid="ops", approver="ops", public_key_file="/nowhere.pub"),)
    client = PortalClient(RemoteSettings(url=f"http://{portal.address.authority}", keys=keys, wait_seconds=1.0))
    waits = []

    def wait(stop, seconds):
        waits.append(seconds)
        return stop.wait(0.01)

    channel = PortalPoller(
        client,
        vm_id=lambda: "vm",
        receive=lambda _tokens: gate.wait(),
        clock=Clock(monotonic=clock.monotonic),
        wait=wait,
    )
    channel.waits = waits
    channel.start()
    yield channel
    gate.set()
    channel.stop()


def test_way_to_the_portal_that_hangs_is_late(portal, channel, clock, gate):
    portal.say(200, body=json.dumps({"index": 2, "decisions": ["a token"]}).encode())
    until(lambda: portal.requests)
    time.sleep(0.05)
    assert channel.loop_watch.late_seconds == 0
    clock.lead_seconds += LONG_SECONDS
    until(lambda: channel.loop_watch.late_seconds > 0)
    gate.set()
    until(lambda: channel.loop_watch.late_seconds == 0)


def test_portal_that_is_down_makes_nothing_late(portal, channel, clock):
    portal.say(503, headers={"Retry-After": "3600"})
    until(lambda: 3_600 in channel.waits)
    assert channel.loop_watch.late_seconds == 0
    channel.stop()
    clock.lead_seconds += 1e6
    assert channel.loop_watch.late_seconds == 0


@pytest.fixture
def kit(tmp_path):
    kit = ApproverKit(tmp_path)
    yield kit
    kit.close()


def approving(kit):
    """Have the approver's thread begin to approve an event; return its watch."""
    kit.rules(RuleSettings(name="freeze", event_types=("Freeze",), action="approve", act="each"))
    kit.start()
    kit.approver.start()
    kit.see(kit.event())
    return kit.approver.loop_watch


def test_approver_whose_request_never_ends_is_late(kit, gate):
    kit.imds.on_post = gate.wait
    loop_watch = approving(kit)
    until(lambda: kit.imds.posts)
    assert loop_watch.late_seconds == 0
    kit.wait(60)
    assert loop_watch.late_seconds == 0
    kit.wait(LONG_SECONDS)
    assert loop_watch.late_seconds > LONG_SECONDS / 2
    gate.set()
    until(lambda: loop_watch.late_seconds == 0)
    kit.approver.stop()
    kit.approver.join(PATIENCE_SECONDS)
    kit.wait(LONG_SECONDS)
    assert loop_watch.late_seconds == 0


def test_metadata_service_that_does_not_answer_makes_the_approver_not_late(kit):
    kit.imds.get_answer = ImdsUnreachable("nobody is there")
    loop_watch = approving(kit)
    until(lambda: kit.imds.requests)
    time.sleep(0.05)
    assert loop_watch.late_seconds == 0


def test_an_agent_watches_what_it_runs(tmp_path):
    key = tmp_path / "ops.pub"
    key.write_bytes(b"")
    with Simulator(rate_limit=False) as simulator, HttpPeer() as portal:
        portal.say(503)
        settings = read(
            {
                "imds": {"endpoint": simulator.endpoint},
                "status": {"listen": "127.0.0.1:0"},
                "stop_grace_seconds": 1.0,
                "sinks": [{"type": "stdout"}],
                "approval": {
                    "remote": {
                        "url": f"http://{portal.address.authority}",
                        "keys": [{"kid": "ops", "approver": "ops", "public_key_file": str(key)}],
                    }
                },
            }
        )
        agent = Agent(settings, tmp_path / "state")
        agent.start()
        try:
            assert set(agent._loop_watches()) == {"poll", "delivery:stdout", "main", "approver", "portal"}
            assert json.loads(agent.health.healthz().body) == {"status": "ok", "late": {}}
        finally:
            agent.stop()
