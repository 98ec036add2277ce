"""A stop with a backlog: each pending record is sent or kept, and the agent exits on time.

The tests compare the created records with the records at the peer and in the outbox. The peer has every delivered
record. A send that the stop interrupts might reach the peer and stay pending. In this case, the agent sends the record
again with the same ID.
"""

import json
import os
import signal
import sqlite3
import time
from contextlib import ExitStack, closing

import pytest
from imds_documents import document, event

from bridge.agent.control_requests import Source, read_status
from bridge.testing.http_peer import HttpPeer
from bridge.testing.peers import closed_port, silent_listener
from bridge.testing.simulator.imds_api import Answer

GRACE_SECONDS = 1.0
#: The documented limit after the grace period, plus 6 s for a busy machine. The sum is less than half of the duration
#: of each hang.
THEN_SECONDS = 1.0 + 6.0
EVENTS = 1_000
SLOW_SECONDS = 0.01

TOP = "stop_grace_seconds = {grace}\n"
WEBHOOK = '[[sinks]]\nname = "{name}"\ntype = "webhook"\nurl = "http://{authority}/"\ntimeout_seconds = {timeout}\n'
STDOUT = '[[sinks]]\nname = "stdout"\ntype = "stdout"\n'


def events_of(status, count):
    return [event(f"E-{number}", status) for number in range(count)]


def slowly(_request):
    time.sleep(SLOW_SECONDS)
    return Answer()


@pytest.fixture
def slow():
    """A peer that accepts at most 100 records per second."""
    with HttpPeer(ids_in=lambda request: [request.headers["webhook-id"]]) as peer:
        peer.reply(slowly)
        yield peer


@pytest.fixture
def address_of(slow):
    """Return a function that returns the address of a peer by kind."""
    with ExitStack() as stack:
        kinds = {
            "slow": lambda: slow.address,
            "dead": lambda: stack.enter_context(closed_port()),
            "silent": lambda: stack.enter_context(silent_listener())[0],
        }
        yield lambda kind: kinds[kind]()


def configure(agent, imds_url, sinks, *, grace=GRACE_SECONDS):
    agent.configure(imds_url, sinks)
    agent.config.write_text(TOP.format(grace=grace) + agent.config.read_text())


def webhook(name, address, *, timeout=20):
    return WEBHOOK.format(name=name, authority=address.authority, timeout=timeout)


def start_with_backlog(agent, imds, *, events):
    """Start the agent, and wait until it has recorded two transitions of each event."""
    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.start()
    imds.wait_for_polls(2)
    imds.show(document(2, *events_of("Scheduled", events)))
    imds.show(document(3, *events_of("Started", events)))


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


def assert_complete(agent, sinks, *, count):
    """Each record is delivered or pending at each sink, and the counters agree."""
    created = {record_id for (record_id,) in query(agent, "SELECT id FROM records")}
    counters = read_status(Source(agent.state)).totals.sinks
    assert len(created) == count
    for sink in sinks:
        by_state = rows(agent, sink)
        delivered, pending = by_state.pop("delivered", set()), by_state.pop("pending", set())
        assert not by_state
        assert delivered | pending == created
        assert len(delivered) + len(pending) == count
        assert (counters[sink].accepted, counters[sink].delivered, counters[sink].pending) == (
            count,
            len(delivered),
            len(pending),
        )


def assert_delivered_is_at(peer, agent, sink="slow"):
    """The peer has all delivered records, and at most the interrupted send is also pending."""
    delivered = rows(agent, sink).get("delivered", set())
    assert delivered <= set(received(peer))
    assert len(set(received(peer)) - delivered) <= 1


def test_stop_sends_or_keeps_a_backlog_of_thousands(agent, imds, slow, address_of):
    kinds = ["slow", "dead", "silent"]
    configure(agent, imds.url, STDOUT + "".join(webhook(kind, address_of(kind)) for kind in kinds))
    start_with_backlog(agent, imds, events=EVENTS)
    agent.wait_for(lambda: len(slow.received) > 20)
    stop_in_time(agent)
    assert_complete(agent, ["stdout", *kinds], count=2 * EVENTS)
    assert_delivered_is_at(slow, agent)
    assert {record["id"] for record in agent.records} >= rows(agent, "stdout").get("delivered", set())
    [stopped] = [line for line in map(json.loads, agent.log.splitlines()) if line["message"] == "The agent stopped."]
    pending = {kind: len(rows(agent, kind).get("pending", ())) for kind in ["stdout", *kinds]}
    assert stopped["pending"] in (pending, None), "None means that the outbox was too busy"


def test_next_start_sends_the_kept_backlog_with_at_most_one_duplicate(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    start_with_backlog(agent, imds, events=200)
    wait_for_more(agent, slow, 20)
    stop_in_time(agent)
    assert_delivered_is_at(slow, agent)
    slow.accept()
    agent.start()
    agent.wait_for(lambda: len(set(received(slow))) == 400)
    stop_in_time(agent)
    assert_complete(agent, ["slow"], count=400)
    assert not rows(agent, "slow").get("pending")
    assert len(received(slow)) <= 401


def test_sigint_stops_the_agent_and_further_signals_have_no_effect(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    start_with_backlog(agent, imds, events=200)
    agent.process.send_signal(signal.SIGINT)
    wait_for_more(agent, slow, 5)  # The agent sends the backlog.
    stop_in_time(agent, signal.SIGTERM, signal.SIGINT)
    assert_complete(agent, ["slow"], count=400)
    assert_delivered_is_at(slow, agent)


def test_stop_without_a_grace_period_cancels_the_send_and_keeps_the_backlog(agent, imds, slow, address_of):
    configure(agent, imds.url, webhook("slow", slow.address) + webhook("silent", address_of("silent")), grace=0)
    start_with_backlog(agent, imds, events=200)
    wait_for_more(agent, slow, 5)
    stop_in_time(agent, grace=0)
    assert_complete(agent, ["slow", "silent"], count=400)
    assert_delivered_is_at(slow, agent)


def test_stop_during_a_hung_first_poll_sends_earlier_pending_records(agent, imds, slow, address_of):
    configure(agent, imds.url, webhook("sink", address_of("dead")))
    start_with_backlog(agent, imds, events=10)
    stop_in_time(agent)
    imds.answer = lambda handler: handler.server.released.wait(30)
    configure(agent, imds.url, webhook("sink", slow.address), grace=10)  # enough time for all pending records
    served = imds.served
    agent.start()
    agent.wait_for(lambda: imds.served > served)
    stop_in_time(agent, grace=10)
    assert_complete(agent, ["sink"], count=20)
    assert_delivered_is_at(slow, agent, "sink")
    assert len(received(slow)) == 20


def test_stop_during_a_reload_keeps_pending_records(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    start_with_backlog(agent, imds, events=200)
    with silent_listener() as (address, listener):
        listener.settimeout(20)
        configure(agent, f"http://{address.authority}", webhook("slow", slow.address, timeout=21))
        text = agent.config.read_text()
        agent.config.write_text(text.replace("[imds]\n", "[imds]\ntimeout_seconds = 30\n"))
        agent.process.send_signal(signal.SIGHUP)
        with closing(listener.accept()[0]):  # The reload waits for the identity of this VM.
            stop_in_time(agent)
    assert "was reloaded" not in agent.log
    assert_complete(agent, ["slow"], count=400)
    assert_delivered_is_at(slow, agent)


def test_records_that_a_stop_cannot_save_are_recreated_by_the_next_start(agent, imds, slow):
    configure(agent, imds.url, webhook("slow", slow.address))
    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.start()
    imds.wait_for_polls(2)
    with closing(sqlite3.connect(agent.state / "outbox-1.db", isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        imds.show(document(2, *events_of("Scheduled", 200)), polls=1)
        agent.wait_for(lambda: len(slow.received) > 20, timeout_seconds=30)
        agent.wait_for(lambda: "The outbox cannot be saved" in agent.log)
        stop_in_time(agent)
    assert rows(agent, "slow") == {}
    slow.accept()
    agent.start()
    agent.wait_for(lambda: rows(agent, "slow").keys() == {"delivered"})
    stop_in_time(agent)
    assert_complete(agent, ["slow"], count=200)
    assert set(received(slow)) == rows(agent, "slow")["delivered"], "the IDs differ after the restart"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in the file system")
def test_stalled_stdout_reader_neither_delays_a_stop_nor_misses_records(agent, imds):
    os.mkfifo(agent.out)
    reader = os.open(agent.out, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        configure(agent, imds.url, STDOUT)
        start_with_backlog(agent, imds, events=200)
        imds.wait_for_polls(5)  # The pipe is now full, and the sink hangs.
        stop_in_time(agent)
        lines = pipe.read(1 << 20).split(b"\n")[:-1]
    assert_complete(agent, ["stdout"], count=400)
    by_state = rows(agent, "stdout")
    assert by_state["pending"], "the backlog is larger than the 64 KiB of a pipe"
    assert by_state.get("delivered", set()) <= {json.loads(line)["id"] for line in lines if line}
