"""The poller sends the requests of PROTOCOL.md and passes on every decision."""

import threading

from poller_kit import HELD_SECONDS, PATIENCE_SECONDS, VM
from waiting import until

from bridge.events.event import VmIdentity

# The request.


def test_request_matches_the_protocol(portal, start, tmp_path):
    (tmp_path / "token").write_text("s3cret-token\n")
    start(portal, remote={"token_file": str(tmp_path / "token"), "url": portal.url + "/"})
    assert portal.wait_for_requests(2)
    first, second = (request for request in portal.requests[:2])

    assert first.asked.path == f"/api/v1/vms/{VM.lower()}/decisions"
    assert dict(first.asked.query) == {"index": "0", "wait": str(HELD_SECONDS)}
    assert first.authorization == "Bearer s3cret-token"
    assert first.asked.headers["accept"] == "application/json"
    assert "cookie" not in first.asked.headers
    assert second.index == 1


def test_poller_waits_while_the_vm_id_is_unknown(portal, desk, start):
    known = []
    asked = threading.Semaphore(0)
    portal.put(VM, "a")

    def vm():
        asked.release()
        return VmIdentity(vm_id=known[0] if known else None)

    start(portal, vm=vm, wait=lambda stop, _: stop.wait(0.01))
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_SECONDS)
    assert not portal.requests
    known.append(VM)
    assert desk.has("a")


# The index.


def test_decision_is_requested_and_passed_on_once(portal, desk, start):
    start(portal)
    portal.put(VM, "a", "b")
    assert desk.has("a", "b")
    portal.put("another vm", "x")
    portal.put(VM, "c")
    assert desk.has("c")

    assert desk.tokens == ["a", "b", "c"]
    indexes = [request.index for request in portal.requests]
    assert indexes == sorted(indexes)


def test_lower_index_restarts_from_zero(portal, desk, start):
    start(portal)
    portal.put(VM, "a", "b", "c")
    assert desk.has("c")
    asked = len(portal.requests)
    portal.lose_state()
    portal.put(VM, "after the loss")
    assert desk.has("after the loss")

    assert 0 in [request.index for request in portal.requests[asked:]]


def test_new_portal_epoch_restarts_from_index_zero(portal, desk, start):
    portal.epoch = "before"
    portal.put(VM, *"abc")
    start(portal)
    assert desk.has(*"abc")
    portal.down()
    portal.lose_state(epoch="restored")
    portal.put(VM, *"defghi")  # without a request; the indexes of "d" and "e" are below the agent's index
    portal.up()
    assert desk.has(*"defghi")


def test_status_204_to_the_first_request_means_no_decisions(portal, start):
    portal.strike("status", status=204, body="")
    channel = start(portal, stream_id=lambda: "first")
    until(lambda: channel.read_in == "first")
    assert portal.wait_for_requests(2)

    assert {request.index for request in portal.requests} == {0}


def test_many_decisions_arrive_in_consecutive_pages(portal, desk, start):
    tokens = [f"t{number}" for number in range(3_500)]
    portal.put(VM, *tokens)
    start(portal)
    assert desk.has(*tokens)

    assert desk.tokens == tokens
    assert [request.index for request in portal.requests[:4]] == [0, 1_001, 2_001, 3_001]


def test_portal_counts_as_read_after_the_last_page(portal, start):
    started = threading.Event()
    pages = []

    def receive(tokens):
        assert started.wait(PATIENCE_SECONDS)
        pages.append((len(tokens), channel.read_in))

    portal.put(VM, *(f"t{number}" for number in range(1_500)))
    channel = start(portal, receive=receive)
    started.set()
    until(lambda: channel.read_in is not None)
    assert pages == [(1_000, None), (500, None), (0, "")]
