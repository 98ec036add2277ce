"""The loops that /healthz watches, apart from the poll and the sinks: the approver and the portal poller."""

import json
import threading
from contextlib import closing

import pytest
from approver_kit import ApproverKit
from waiting import until

from bridge.agent.agent import Agent
from bridge.config.approval import RuleSettings
from bridge.config.loader import read
from bridge.testing import Simulator
from bridge.testing.http_peer import HttpPeer

PATIENCE_SECONDS = 20.0
LONG_SECONDS = 3_600.0


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def kit(tmp_path):
    with closing(ApproverKit(tmp_path)) as kit:
        kit.rules(RuleSettings(name="freeze", event_types=("Freeze",), action="approve", act="each"))
        kit.start()
        yield kit


def test_approver_whose_request_never_ends_is_late(kit, gate):
    kit.imds.on_post, loop_watch = gate.wait, kit.approver.loop_watch
    kit.approver.start()
    kit.see(kit.event())
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


def test_agent_watches_exactly_the_loops_that_it_runs(tmp_path):
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
