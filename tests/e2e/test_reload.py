"""SIGHUP: a valid configuration takes effect without a gap in the polls. An invalid configuration is only logged."""

import json
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from imds_documents import document, event

from bridge.agent.control_requests import Source, read_events, read_status
from bridge.testing import EventSpec, Simulator
from bridge.testing.http_peer import HttpPeer
from bridge.testing.peers import closed_port
from bridge.testing.simulator.imds_api import Answer

STDOUT = '[[sinks]]\nname = "out"\ntype = "stdout"\n'
RULE = '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'


def webhook(name, address, text=""):
    return f'[[sinks]]\nname = "{name}"\ntype = "webhook"\nurl = "http://{address.authority}/"\n{text}\n'


@contextmanager
def http_peer():
    with HttpPeer(ids_in=lambda request: [request.headers["webhook-id"]]) as peer:
        yield peer


@pytest.fixture
def one():
    with http_peer() as peer:
        yield peer


@pytest.fixture
def two():
    with http_peer() as peer:
        yield peer


def received(peer):
    """Return (EventId, transition) of each record that *peer* received, in order."""
    bodies = [json.loads(request.body)["data"] for request in peer.requests if request.body]
    return [(body["event"]["event_id"], body["transition"]) for body in bodies]


def start(agent, imds, sinks, *events):
    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    imds.body = json.dumps(document(1, *events)).encode()
    agent.configure(imds.url, sinks)
    agent.start()
    imds.wait_for_polls(2)
    agent.wait_for(lambda: "The agent is running" in agent.log)


def log(agent):
    return [json.loads(line) for line in agent.log.splitlines()]


def count(agent, words):
    return sum(words in line["message"] for line in log(agent))


def hang_up(agent, *, words="was reloaded"):
    """Send SIGHUP, and wait for the end of the reload."""
    before = count(agent, words)
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for(lambda: count(agent, words) > before)


def put_in_place(agent, imds_url, text):
    """Replace the configuration atomically."""
    ready = agent.config
    agent.config = ready.with_suffix(".new")
    agent.configure(imds_url, text)
    agent.config.replace(ready)
    agent.config = ready


def stop(agent):
    assert agent.stop() == 0, agent.log
    assert "Traceback" not in agent.log


# Valid configurations.


def test_new_sink_gets_active_and_later_events_without_affecting_others(agent, imds, one, two):
    start(agent, imds, webhook("one", one.address), event("E-1"))
    imds.show(document(2, event("E-1", "Started"), event("E-2")))
    agent.configure(imds.url, webhook("one", one.address) + webhook("two", two.address))
    hang_up(agent)
    imds.show(document(3, event("E-2")))
    agent.wait_for(lambda: len(received(two)) == 3)
    stop(agent)
    # The evidence of `completed` is observed, because the reload caused no gap.
    assert received(one) == [("E-1", "scheduled"), ("E-1", "started"), ("E-2", "scheduled"), ("E-1", "completed")]
    assert sorted(received(two)) == [("E-1", "completed"), ("E-1", "started"), ("E-2", "scheduled")]
    records = read_events(Source(agent.state)).records
    assert {record.evidence.value for record in records} == {"observed"}
    assert [record.sequence for record in records] == [4, 3, 2, 1]
    assert [line["sinks"] for line in log(agent) if "was reloaded" in line["message"]] == [["one", "two"]]


def test_polling_continues_while_a_hung_sink_is_replaced(agent, imds, one):
    one.stay_silent()
    start(agent, imds, webhook("one", one.address), event("E-1"))
    agent.wait_for(lambda: one.received)
    agent.configure(imds.url, webhook("one", one.address, "timeout_seconds = 20"))
    served, began_at = imds.served, time.monotonic()
    hang_up(agent)
    polls, seconds = imds.served - served, time.monotonic() - began_at
    assert polls >= seconds / 0.2 / 4, "a busy machine makes at least a quarter of the polls, which are due every 0.2 s"


def test_records_of_a_removed_sink_are_kept_until_the_sink_returns(agent, imds, one):
    with closed_port() as dead:
        start(agent, imds, STDOUT + webhook("hook", dead), event("E-1"), event("E-2"))
        agent.wait_for(lambda: "Sending failed" in agent.log)
    agent.configure(imds.url, STDOUT)
    hang_up(agent)
    pending = [line for line in log(agent) if "not in the configuration" in line["message"]]
    assert [(line["level"], line["sink"], line["pending"]) for line in pending] == [("WARNING", "hook", 2)]
    imds.show(document(2, event("E-1"), event("E-2"), event("E-3")))
    code, out, _ = agent.call("outbox", "list", "--config", agent.config, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["sink"], row["state"], row["record"]["event"]["event_id"]) for row in rows] == [
        ("hook", "pending", "E-1"),
        ("hook", "pending", "E-2"),
    ]
    agent.configure(imds.url, STDOUT + webhook("hook", one.address))
    hang_up(agent)
    agent.wait_for(lambda: len(received(one)) == 2)
    stop(agent)
    assert sorted(received(one)) == [("E-1", "scheduled"), ("E-2", "scheduled")]
    assert len(agent.records) == 3


def test_changed_sink_sends_pending_records_with_its_new_settings(agent, imds, one, two):
    one.refuse_for_now()
    start(agent, imds, webhook("hook", one.address), event("E-1"))
    agent.wait_for(lambda: one.received)
    agent.configure(imds.url, webhook("hook", two.address, 'event_types = ["Reboot"]\nheaders = {X-Team = "b"}'))
    hang_up(agent)
    refused = len(one.received)
    imds.show(document(2, event("E-1"), event("E-2"), event("E-3", event_type="Reboot")))
    agent.wait_for(lambda: len(received(two)) == 2)
    stop(agent)
    # The filter applies to new records, but not to records that were pending before the reload.
    assert sorted(received(two)) == [("E-1", "scheduled"), ("E-3", "scheduled")]
    assert {request.headers["x-team"] for request in two.requests} == {"b"}
    assert len(one.received) == refused


def test_new_labels_and_imds_endpoint_take_effect_immediately(agent, imds):
    start(agent, imds, STDOUT, event("E-1"))
    with Simulator(vms=["vm_0"], rate_limit=False) as azure:
        agent.wait_for(lambda: agent.records)
        put_in_place(agent, azure.endpoint, STDOUT + '[labels]\nteam = "b"\n')
        hang_up(agent)
        served = imds.served
        event_id = azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: event_id in [record["event"]["event_id"] for record in agent.records])
        stop(agent)
    assert imds.served <= served + 1, "one request may have been in progress"
    by_event = {(record["event"]["event_id"], record["transition"]): record["labels"] for record in agent.records}
    assert by_event["E-1", "scheduled"] == {}
    assert by_event[event_id, "scheduled"] == {"team": "b"}


def test_reload_adds_changes_and_removes_approval_rules(agent):
    def approved():
        return [each.event_id for each in azure.world.approvals]

    def announce():
        event_id = azure.world.add_event(EventSpec(event_type="Freeze", on_approval="never", notice_seconds=3600))
        agent.wait_for(lambda: event_id in agent.out.read_text())
        return event_id

    with Simulator(vms=["vm_0"], rate_limit=False) as azure:
        agent.configure(azure.endpoint, STDOUT)
        agent.start()
        first = announce()
        agent.configure(azure.endpoint, STDOUT + RULE)
        hang_up(agent)
        agent.wait_for(lambda: approved() == [first])
        agent.configure(azure.endpoint, STDOUT + RULE.replace("approve", "hold"))
        hang_up(agent)
        held = announce()
        agent.configure(azure.endpoint, STDOUT)
        hang_up(agent)
        ignored = announce()
        polls = len(azure.requests)
        agent.wait_for(lambda: len(azure.requests) > polls + 5)
        stop(agent)
    assert approved() == [first]
    assert {held, ignored} <= {record["event"]["event_id"] for record in agent.records}


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [("state", "[state]", "[state]\nmax_bytes = 5000000"), ("status", 'listen = ""', 'listen = "127.0.0.1:0"')],
    ids=["state", "status"],
)
def test_change_that_requires_a_restart_is_logged_and_the_rest_takes_effect(agent, imds, key, before, after):
    start(agent, imds, STDOUT)
    agent.configure(imds.url, STDOUT + '[labels]\nteam = "b"\n')
    agent.config.write_text(agent.config.read_text().replace(before, after))
    hang_up(agent)
    found = [line for line in log(agent) if "takes effect after a restart" in line["message"]]
    messages = [(line["level"], line["message"]) for line in found]
    assert messages == [
        ("WARNING", f"A change of [{key}] takes effect after a restart. All other changes are in effect.")
    ]
    imds.show(document(2, event("E-1")))
    agent.wait_for(lambda: agent.records)
    stop(agent)
    assert agent.records[0]["labels"] == {"team": "b"}
    assert "status.listen: listening" not in agent.log


# Invalid configurations.


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


WRONG = {
    "syntax": (lambda path: path.write_text("[imds\n"), ["is not valid TOML"]),
    "three mistakes": (
        lambda path: path.write_text('[imds]\ntimeout_seconds = "5"\n[lables]\n[[sinks]]\ntype = "stdot"\n'),
        ["imds.timeout_seconds", "lables", "stdot"],
    ),
    "missing": (Path.unlink, ["does not exist"]),
    "empty": (lambda path: path.write_text(""), ["empty"]),
    "pipe": (_pipe, ["not a regular file"]),
}


@pytest.mark.parametrize("how", WRONG)
def test_invalid_file_changes_nothing_and_logs_each_problem_once(agent, imds, one, how):
    spoil, words = WRONG[how]
    start(agent, imds, webhook("hook", one.address, "timeout_seconds = 7.0"), event("E-1"))
    spoil(agent.config)
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for(lambda: [line for line in log(agent) if line["level"] == "ERROR"] or count(agent, "was reloaded"))
    imds.show(document(2, event("E-1", "Started")), polls=8)  # enough time for a second message
    agent.wait_for(lambda: len(received(one)) == 2)
    _, shown, _ = agent.call("status", "--state-directory", agent.state)
    assert "The agent rejected its file at the last reload" in " ".join(shown.split())
    stop(agent)
    assert received(one) == [("E-1", "scheduled"), ("E-1", "started")]
    messages = [line["message"] for line in log(agent) if line["level"] == "ERROR"]
    assert len(messages) == len(words)
    assert all("Nothing was changed" in message for message in messages)
    assert all(any(word in message for message in messages) for word in words), messages
    assert not count(agent, "was reloaded")


# Many reloads.


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only /proc shows the open descriptors")
def test_thirty_reloads_lose_no_records_and_leak_no_threads_or_descriptors(agent, imds, one):
    def slowly(_request):
        time.sleep(0.01)
        return Answer()

    def open_now():
        proc = Path(f"/proc/{agent.process.pid}")
        return len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))

    def sinks(number):
        return STDOUT + webhook("hook", one.address, f"timeout_seconds = {10 + number % 2}")

    one.reply(slowly)
    start(agent, imds, sinks(0), event("E-0"))
    agent.wait_for(lambda: len(received(one)) == 1)
    before = open_now()
    events = []
    for number in range(30):
        events += [event(f"E-{number}-{each}") for each in range(6)]
        imds.body = json.dumps(document(2 + number, event("E-0"), *events)).encode()
        put_in_place(agent, imds.url, sinks(number + 1))
        if number % 10:
            agent.process.send_signal(signal.SIGHUP)  # All signals during a reload cause one further reload.
        else:
            hang_up(agent)
        imds.wait_for_polls(1)
    agent.wait_for(lambda: len(set(received(one))) == 181, timeout_seconds=60)
    agent.wait_for(lambda: len(agent.records) == 181)
    hang_up(agent)  # After this reload, no earlier reload is in progress.
    imds.show(document(60, *events))
    agent.wait_for(lambda: len(set(received(one))) == 182)
    threads, descriptors = before
    # SQLite can keep one descriptor of the outbox for its next user.
    agent.wait_for(lambda: open_now()[0] <= threads and open_now()[1] <= descriptors + 1)
    stop(agent)
    assert count(agent, "was reloaded") >= 3
    assert {name for name, _ in received(one)} == {"E-0", *(each["EventId"] for each in events)}
    sinks = read_status(Source(agent.state)).totals.sinks
    assert {name: row.pending for name, row in sinks.items()} == {"out": 0, "hook": 0}
    assert len(agent.records) == 182, "a reload does not replace an unchanged sink, so there are no duplicates"
