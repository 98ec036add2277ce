"""A stop with a backlog: what is owed is sent or kept, all of it, and the exit is in time.

What was made is counted against what the peer has and what the outbox keeps. Nothing may be called delivered that the
peer has not; the one send that a stop cuts may be at the peer and still be owed, and comes again with the same id.
"""

import json
import os
import signal
import sqlite3
import time
from contextlib import ExitStack, closing

import pytest

from bridge.agent.control_requests import Source, read_status
from bridge.testing.http_peer import HttpPeer
from bridge.testing.peers import nobody, silent_listener
from bridge.testing.simulator.imds_api import Answer

GRACE_SECONDS = 1.0
#: What the agent promises after its grace, and what a busy machine takes on top: less than half of how long hangs what
#: it must not wait for.
THEN_SECONDS = 1.0 + 6.0
EVENTS = 1_000
SLOW_SECONDS = 0.01

TOP = "stop_grace_seconds = {grace}\n"
WEBHOOK = '[[sinks]]\nname = "{name}"\ntype = "webhook"\nurl = "http://{authority}/"\ntimeout_seconds = {timeout}\n'
STDOUT = '[[sinks]]\nname = "stdout"\ntype = "stdout"\n'


def document(incarnation, status, count):
    events = [
        {"EventId": f"E-{number}", "EventStatus": status, "EventType": "Freeze", "Resources": ["vm_0"]}
        for number in range(count)
    ]
    return {"DocumentIncarnation": incarnation, "Events": events}


def slowly(_request):
    time.sleep(SLOW_SECONDS)
    return Answer()


@pytest.fixture
def slow():
    """A peer that takes everything, a hundred records a second at most."""
    with HttpPeer(ids_in=lambda request: [request.headers["webhook-id"]]) as peer:
        peer.reply(slowly)
        yield peer


@pytest.fixture
def address_of(slow):
    """Return what gives the address of a peer of some kind."""
    with ExitStack() as stack:
        kinds = {
            "slow": lambda: slow.address,
            "dead": lambda: stack.enter_context(nobody()),
            "silent": lambda: stack.enter_context(silent_listener())[0],
        }
        yield lambda kind: kinds[kind]()


def configure(agent, imds_url, sinks, *, grace=GRACE_SECONDS):
    agent.configure(imds_url, sinks)
    agent.config.write_text(TOP.format(grace=grace) + agent.config.read_text())


def webhook(name, address, *, timeout=20):
    return WEBHOOK.format(name=name, authority=address.authority, timeout=timeout)


def start_with_backlog(agent, imds, *, events):
    """Start the agent and let it record *events* twice."""
    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.start()
    imds.wait_for_polls(2)
    imds.show(document(2, "Scheduled", events))
    imds.show(document(3, "Started", events))


def received(peer):
    return [record_id for ids in peer.received for record_id in ids]


def wait_for_more(agent, peer, count):
    least = len(peer.received) + count
    agent.wait_for(lambda: len(peer.received) >= least)


def stop_in_time(agent, *signals, grace=GRACE_SECONDS):
    began_at = time.monotonic()
    for number in signals or (signal.SIGTERM,):
        agent.process.send_signal(number)
    assert agent.process.wait(30) == 0, agent.log
    assert time.monotonic() - began_at < grace + THEN_SECONDS, agent.log
    assert "Traceback" not in agent.log


def query(agent, sql, *arguments):
    """Return the rows from the newest file of the outbox."""
    file = max(agent.state.glob("outbox-*.db"), key=lambda path: int(path.stem.partition("-")[2]))
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(sql, arguments).fetchall()


def rows(agent, sink):
    """Return the record ids of *sink* by the state of the delivery."""
    found = query(agent, "SELECT state, id FROM deliveries JOIN records USING (sequence) WHERE sink = ?", sink)
    return {state: {each for its_state, each in found if its_state == state} for state, _ in found}


def assert_all_there(agent, sinks, *, count):
    """Nothing is missing: each record is delivered or pending at each sink, and the accounts say the same."""
    made = {record_id for (record_id,) in query(agent, "SELECT id FROM records")}
    accounts = read_status(Source(agent.state)).totals.sinks
    assert len(made) == count
    for sink in sinks:
        by_state = rows(agent, sink)
        delivered, pending = by_state.pop("delivered", set()), by_state.pop("pending", set())
        assert not by_state
        assert delivered | pending == made
        assert len(delivered) + len(pending) == count
        assert (accounts[sink].accepted, accounts[sink].delivered, accounts[sink].pending) == (
            count,
            len(delivered),
            len(pending),
        )


def assert_delivered_is_at(peer, agent, sink="slow"):
    """The peer has all delivered records, and at most the interrupted send is also pending."""
    delivered = rows(agent, sink).get("delivered", set())
    assert delivered <= set(received(peer))
    assert len(set(received(peer)) - delivered) <= 1


def test_a_backlog_of_thousands_is_sent_or_kept(agent, imds, slow, address_of):
    kinds = ["slow", "dead", "silent"]
    configure(agent, imds.url, STDOUT + "".join(webhook(kind, address_of(kind)) for kind in kinds))
    start_with_backlog(agent, imds, events=EVENTS)
    agent.wait_for(lambda: len(slow.received) > 20)
    stop_in_time(agent)
    assert_all_there(agent, ["stdout", *kinds], count=2 * EVENTS)
    assert_delivered_is_at(slow, agent)
    assert {record["id"] for record in agent.records} >= rows(agent, "stdout").get("delivered", set())
    [said] = [line for line in map(json.loads, agent.log.splitlines()) if line["message"] == "The agent stopped."]
    owed = {kind: len(rows(agent, kind).get("pending", ())) for kind in ["stdout", *kinds]}
    assert said["pending"] in (owed, None), "None: the outbox was too busy to say"


def test_the_next_start_sends_what_the_stop_kept_and_at_most_the_cut_send_again(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    start_with_backlog(agent, imds, events=200)
    wait_for_more(agent, slow, 20)
    stop_in_time(agent)
    assert_delivered_is_at(slow, agent)
    slow.accept()
    agent.start()
    agent.wait_for(lambda: len(set(received(slow))) == 400)
    stop_in_time(agent)
    assert_all_there(agent, ["slow"], count=400)
    assert not rows(agent, "slow").get("pending")
    assert len(received(slow)) <= 401


def test_an_interrupt_is_a_stop_and_a_second_signal_neither_hurries_nor_harms_it(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    start_with_backlog(agent, imds, events=200)
    agent.process.send_signal(signal.SIGINT)
    wait_for_more(agent, slow, 5)  # it drains
    stop_in_time(agent, signal.SIGTERM, signal.SIGINT)
    assert_all_there(agent, ["slow"], count=400)
    assert_delivered_is_at(slow, agent)


def test_without_grace_the_send_under_way_is_cut_and_everything_is_kept(agent, imds, slow, address_of):
    configure(agent, imds.url, webhook("slow", slow.address) + webhook("silent", address_of("silent")), grace=0)
    start_with_backlog(agent, imds, events=200)
    wait_for_more(agent, slow, 5)
    stop_in_time(agent, grace=0)
    assert_all_there(agent, ["slow", "silent"], count=400)
    assert_delivered_is_at(slow, agent)


def test_a_stop_while_the_first_call_of_imds_hangs_sends_what_was_owed_before(agent, imds, slow, address_of):
    configure(agent, imds.url, webhook("sink", address_of("dead")))
    start_with_backlog(agent, imds, events=10)
    stop_in_time(agent)
    imds.answer = lambda handler: handler.server.released.wait(30)
    configure(agent, imds.url, webhook("sink", slow.address), grace=10)  # ample, for what is owed
    served = imds.served
    agent.start()
    agent.wait_for(lambda: imds.served > served)
    stop_in_time(agent, grace=10)
    assert_all_there(agent, ["sink"], count=20)
    assert_delivered_is_at(slow, agent, "sink")
    assert len(received(slow)) == 20


def test_a_stop_during_a_reload_keeps_what_is_owed(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    start_with_backlog(agent, imds, events=200)
    with silent_listener() as (address, listener):
        listener.settimeout(20)
        configure(agent, f"http://{address.authority}", webhook("slow", slow.address, timeout=21))
        text = agent.config.read_text()
        agent.config.write_text(text.replace("[imds]\n", "[imds]\ntimeout_seconds = 30\n"))
        agent.process.send_signal(signal.SIGHUP)
        with closing(listener.accept()[0]):  # the reload asks who this VM is, and waits
            stop_in_time(agent)
    assert "was reloaded" not in agent.log
    assert_all_there(agent, ["slow"], count=400)
    assert_delivered_is_at(slow, agent)


def test_what_a_stop_cannot_write_down_is_seen_again_by_the_next_start(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.start()
    imds.wait_for_polls(2)
    with closing(sqlite3.connect(agent.state / "outbox-1.db", isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        imds.show(document(2, "Scheduled", 200), polls=1)
        agent.wait_for(lambda: len(slow.received) > 20, timeout_seconds=30)
        agent.wait_for(lambda: "The outbox cannot be saved" in agent.log)
        stop_in_time(agent)
    assert rows(agent, "slow") == {}
    slow.accept()
    agent.start()
    agent.wait_for(lambda: rows(agent, "slow").keys() == {"delivered"})
    stop_in_time(agent)
    assert_all_there(agent, ["slow"], count=200)
    assert set(received(slow)) == rows(agent, "slow")["delivered"], "again under the same ids"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in the file system")
def test_a_reader_of_standard_output_that_stalls_holds_no_stop_and_gets_all_that_counts_as_delivered(agent, imds):
    os.mkfifo(agent.out)
    reader = os.open(agent.out, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        configure(agent, imds.url, STDOUT)
        start_with_backlog(agent, imds, events=200)
        imds.wait_for_polls(5)  # by then the pipe is full, and the sink hangs
        stop_in_time(agent)
        lines = pipe.read(1 << 20).split(b"\n")[:-1]
    assert_all_there(agent, ["stdout"], count=400)
    by_state = rows(agent, "stdout")
    assert by_state["pending"], "a pipe holds 64 KiB, and this is more"
    assert by_state.get("delivered", set()) <= {json.loads(line)["id"] for line in lines if line}
