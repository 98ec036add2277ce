"""Two real agents in a simulated availability set, and the CloudEvents that they send to an event hub."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridge.testing import EventSpec, Machine, Simulator
from bridge.testing.http_peer import HttpPeer

FIRST, SECOND = "WestNO_0", "WestNO_1"
_CONFIG = """
[imds]
endpoint = "{imds}"
poll_interval_seconds = 0.25
[state]
directory = "{state}"
[status]
listen = ""
[heartbeat]
interval_seconds = 1
[labels]
team = "payments"
[[sinks]]
type = "webhook"
url = "{hub}"
scope = "all"
heartbeat = true
[[approval.rules]]
name = "own-reboots"
event_sources = ["User"]
action = "approve"
"""
_PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.05

CloudEvent = dict[str, Any]


class _Fleet:
    def __init__(self, directory: Path, env: Mapping[str, str], simulator: Simulator, hub: HttpPeer) -> None:
        self._directory, self._env, self._simulator, self._hub = directory, env, simulator, hub
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, vm: str) -> None:
        home = self._directory / vm
        home.mkdir()
        config = home / "config.toml"
        imds = self._simulator.endpoints[vm]
        hub = f"http://{self._hub.address.authority}/"
        config.write_text(_CONFIG.format(imds=imds, state=home / "state", hub=hub))
        command = [sys.executable, "-m", "bridge", "run", "--config", str(config)]
        with (home / "log").open("wb") as log:
            self.agents[vm] = subprocess.Popen(command, env=dict(self._env), cwd=home, stdout=log, stderr=log)

    @property
    def sent(self) -> list[CloudEvent]:
        return [json.loads(request.body) for request in self._hub.requests]

    def wait_for(self, count: int, transition: str, event_id: str | None) -> None:
        """Wait for *count* records with *transition* of *event_id*. A heartbeat has the EventId None."""
        self._until(lambda: self._count(transition, event_id) >= count, f"{count} x {transition} of {event_id}")

    def _count(self, transition: str, event_id: str | None) -> int:
        records = [each["data"] for each in self.sent]
        return sum(
            record["transition"] == transition and (record["event"] or {}).get("event_id") == event_id
            for record in records
        )

    def _until(self, found: Callable[[], bool], what: str) -> None:
        never = threading.Event()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not found():
            logs = [(self._directory / vm / "log").read_text() for vm in self.agents]
            assert time.monotonic() < deadline, f"{what} did not arrive: {logs}"
            never.wait(_LOOK_SECONDS)

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()


def run_fleet(directory: Path, env: Mapping[str, str]) -> list[CloudEvent]:
    """Return the CloudEvents of both agents about six events, in arrival order. The second agent is killed at the end.

    The events: "freeze" of both VMs, announced, started, over; "reboot" of the first, by its user, approved by a rule;
    "redeploy" of the second, called off; "failure" of the second, without a warning; "open", a freeze of the first
    that never ends; "evicted", a Preempt of the second.
    """
    machines = [Machine(name=FIRST), Machine(name=SECOND)]
    with HttpPeer() as hub, Simulator(vms=machines, rate_limit=False) as simulator:
        fleet = _Fleet(directory, env, simulator, hub)
        try:
            fleet.start(FIRST)
            fleet.start(SECOND)
            fleet.wait_for(2, "heartbeat", None)
            _play(fleet, simulator)
            return fleet.sent
        finally:
            fleet.close()


def _play(fleet: _Fleet, simulator: Simulator) -> None:
    world = simulator.world

    def add(event_id: str, event_type: str, *vms: str, **fields: Any) -> None:
        values = {"on_not_before": "stay", "impact_seconds": float("inf"), **fields}
        world.add_event(EventSpec(event_type=event_type, event_id=event_id, resources=vms, **values))
        fleet.wait_for(2, "started" if fields.get("status") == "Started" else "scheduled", event_id)

    def begin(event_id: str) -> None:
        world.start(event_id)
        fleet.wait_for(2, "started", event_id)

    def end(event_id: str) -> None:
        world.complete(event_id)
        fleet.wait_for(2, "completed", event_id)

    add("freeze", "Freeze", FIRST, SECOND, notice_seconds=900, duration_seconds=5)
    begin("freeze")
    end("freeze")
    add("reboot", "Reboot", FIRST, notice_seconds=890, event_source="User", approval_delay_seconds=1)
    fleet.wait_for(1, "approved", "reboot")
    fleet.wait_for(2, "started", "reboot")
    end("reboot")
    add("redeploy", "Redeploy", SECOND, notice_seconds=600)
    world.cancel("redeploy")
    fleet.wait_for(2, "canceled", "redeploy")
    add("failure", "Reboot", SECOND, status="Started")
    end("failure")
    add("open", "Freeze", FIRST, notice_seconds=800, duration_seconds=9)
    begin("open")
    add("evicted", "Preempt", SECOND, notice_seconds=30)
    begin("evicted")
    fleet.agents[SECOND].kill()
