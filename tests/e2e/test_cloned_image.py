"""A state directory that might be part of a machine image, while IMDS does not return the identity of this VM."""

import json
import sqlite3
from contextlib import closing

import pytest
from imds_documents import document, event

from bridge.testing.http_peer import HttpPeer

FIRST = (200, b'{"name": "vm_a", "vmId": "AAAA"}')
CLONE = (200, b'{"name": "vm_b", "vmId": "BBBB"}')


@pytest.fixture
def peer():
    with HttpPeer(ids_in=lambda request: [request.headers.get("webhook-id", "")]) as made:
        yield made


def received(peer):
    """Return the distinct transitions sent since the start from the image."""
    bodies = [json.loads(request.body)["data"] for request in peer.requests[peer.before :] if request.body]
    return list(dict.fromkeys((body["event"]["event_id"], body["transition"], body["vm"]["name"]) for body in bodies))


def boot(agent):
    """Make the next start the first start after a boot."""
    (path,) = agent.state.glob("outbox-*.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = 'an earlier boot' WHERE key IN ('boot_id', 'vm_boot_id')")
        connection.commit()


def is_replaced(agent):
    return "The stored state belongs to another machine" in agent.log


@pytest.fixture
def image(agent, imds, peer):
    """The state of vm_a with active E-1 and E-2. Standard output has both records, and the webhook has neither."""
    peer.refuse_for_now()
    imds.identity = FIRST
    imds.body = json.dumps(document(1)).encode()
    agent.configure(
        imds.url,
        '[[sinks]]\ntype = "stdout"\nscope = "mine"\n'
        f'[[sinks]]\ntype = "webhook"\nurl = "http://{peer.address.authority}/"\n',
    )
    agent.start()
    imds.wait_for_polls(2)
    imds.show(document(2, event("E-1", vm="vm_a"), event("E-2", "Started", vm="vm_a")))
    agent.wait_for(lambda: len(agent.records) == 2)
    assert agent.stop() == 0
    boot(agent)
    agent.out.unlink()
    peer.before = len(peer.requests)
    peer.say(200)
    return agent


def test_clone_omits_events_of_the_source_vm_and_sends_its_eviction_at_once(image, imds, peer):
    imds.identity = (503, b"")
    imds.body = json.dumps(document(1, event("P-1", vm="vm_b", event_type="Preempt"))).encode()
    image.start()
    image.wait_for(lambda: image.records and received(peer))
    imds.identity = CLONE
    image.wait_for(lambda: is_replaced(image))
    imds.show(
        document(2, event("P-1", vm="vm_b", event_type="Preempt"), event("E-3", vm="vm_b"), event("E-4", vm="vm_a"))
    )
    expected = [("P-1", "scheduled", None), ("P-1", "scheduled", "vm_b"), ("E-3", "scheduled", "vm_b")]
    image.wait_for(lambda: len(image.records) >= 3 and len(received(peer)) >= 3)
    assert image.stop() == 0
    assert received(peer) == expected, "an urgent record has a second ID after the identity is known"
    assert [record["event"]["event_id"] for record in image.records] == ["P-1", "P-1", "E-3"]
    assert [record["affects_this_vm"] for record in image.records] == [None, True, True]


def test_same_vm_resumes_its_stored_state_once_its_identity_is_known(image, imds, peer):
    imds.identity = (503, b"")
    imds.body = json.dumps(document(3, event("E-1", vm="vm_a"), event("E-3", vm="vm_a"))).encode()
    image.start()
    imds.wait_for_polls(3)
    assert not received(peer)
    imds.identity = FIRST
    image.wait_for(lambda: len(received(peer)) == 4 and len(image.records) == 2)
    assert image.stop() == 0
    assert not is_replaced(image)
    assert sorted(received(peer)) == [
        ("E-1", "scheduled", "vm_a"),
        ("E-2", "completed", "vm_a"),
        ("E-2", "started", "vm_a"),
        ("E-3", "scheduled", "vm_a"),
    ]
    assert sorted(record["event"]["event_id"] for record in image.records) == ["E-2", "E-3"]


def test_clone_does_not_refresh_alerts_of_the_source_vm(agent, imds, peer):
    peer.before = 0
    imds.identity = FIRST
    imds.body = json.dumps(document(1, event("E-1", vm="vm_a"))).encode()
    sink = (
        f'type = "webhook"\nformat = "alertmanager"\nurl = "http://{peer.address.authority}"\nrefresh_seconds = 0.3\n'
    )
    agent.configure(imds.url, f"[[sinks]]\n{sink}")
    agent.start()
    agent.wait_for(lambda: len(peer.requests) > 1)
    assert agent.stop() == 0
    boot(agent)
    before = len(peer.requests)
    imds.identity = (503, b"")
    agent.start()
    imds.wait_for_polls(6)
    assert len(peer.requests) == before
    imds.identity = FIRST
    agent.wait_for(lambda: len(peer.requests) > before)
    assert agent.stop() == 0
