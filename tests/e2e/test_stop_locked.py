"""A stop while another program holds the outbox: what is in memory goes back to the disk as soon as that lets go."""

from __future__ import annotations

import sqlite3
import threading
import time

from bridge.testing.http_peer import HttpPeer


def document(incarnation: int, *statuses: str) -> dict[str, object]:
    events = [
        {
            "EventId": "E-1",
            "EventType": "Freeze",
            "EventStatus": status,
            "ResourceType": "VirtualMachine",
            "Resources": ["vm1"],
            "NotBefore": "",
        }
        for status in statuses
    ]
    return {"DocumentIncarnation": incarnation, "Events": events}


def test_records_in_memory_survive_a_lock_that_ends_within_the_grace(agent, imds):
    with HttpPeer() as peer:
        peer.say(503)
        agent.configure(imds.url, f'[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:{peer.address.port}/"')
        imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
        agent.start()
        imds.wait_for_polls(3)
        other = sqlite3.connect(agent.state / "outbox.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        imds.show(document(2, "Started"), polls=1)
        deadline = time.monotonic() + 40
        while "Work goes on in memory" not in agent.err.read_text():
            assert time.monotonic() < deadline, "the agent waits for the lock for ever"
            time.sleep(0.1)
        threading.Timer(1.5, lambda: other.execute("ROLLBACK")).start()
        assert agent.stop(timeout_seconds=30) == 0
        other.close()
        assert "What is in memory is lost" not in agent.err.read_text()
        code, listed, _ = agent.call("outbox", "list", "--json", "--config", agent.config)
        assert code == 0
        assert '"transition":"started"' in listed
