"""`status`, `events` and `outbox list` as a person meets them: beside a running agent, after it, in every trouble."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from answering import answering
from held_port import held_port

from bridge.outbox.reader import OutboxFile
from bridge.testing import EventSpec, Simulator
from bridge.testing.peers import nobody

resource = pytest.importorskip("resource", reason="Windows has neither flock nor limits to files")

KEYS = {
    "": {
        *("schema_version", "at", "known_at", "agent", "vm", "imds", "state", "configuration_problem"),
        *("configuration", "events", "sinks"),
    },
    "agent": {"running", "ready", "reasons", "version", "asked", "problem"},
    "configuration": {"file", "looked_for", "agent_file", "version"},
    "vm": {"name", "vm_id"},
    "imds": {"endpoint", "last_good_poll_at", "last_good_poll_seconds_ago", "last_good_poll_is_live"},
    "state": {
        *("directory", "stream_id", "in_memory", "approvals_disabled", "outbox_bytes", "max_bytes", "set_aside"),
        *("approvals_unsafe", "unusable_keys", "loading"),
    },
    "events": {
        *("event_id", "event_type", "event_status", "event_source", "not_before", "seconds_to_not_before"),
        *("duration_seconds", "resources", "affects_this_vm", "last_transition", "approval", "decisions"),
        *("resource_type", "not_before_raw", "description", "extra"),
    },
    "sinks": {
        *("name", "configured", "accepted", "delivered", "pending", "parked", "evicted", "discarded", "expired"),
        *("oldest_pending_seconds", "last_error", "last_error_at", "needs_attention"),
    },
}
#: Runs a command as nobody, who may not even read the standard library: so all that is needed is imported before.
AS_NOBODY = """
import os, sys
import bridge.cli.commands, bridge.cli.status, bridge.config.sinks, encodings.idna, encodings.utf_8_sig
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
bridge.cli.main()
"""


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0", "vm_1", "vm_2"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def peer():
    """An endpoint that answers each path with the status it names."""
    with answering(lambda path: (int(path.strip("/")), b"it says so")) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def dead():
    """An endpoint that refuses connections."""
    with nobody() as address:
        yield f"http://{address.authority}"


@pytest.fixture
def agent(agent):
    """The agent, and a port for its status that is nobody else's."""
    with held_port() as agent.status_port:
        yield agent


def configure(agent, endpoint, text="", *, listen=None):
    listen = f"127.0.0.1:{agent.status_port}" if listen is None else listen
    agent.config.write_text(
        f'[imds]\nendpoint = "{endpoint}"\npoll_interval_seconds = 0.2\n[state]\ndirectory = "{agent.state}"\n'
        f'[status]\nlisten = "{listen}"\n{text}\n'
    )
    return listen


def webhook(name, url):
    return f'[[sinks]]\ntype = "webhook"\nname = "{name}"\nurl = "{url}"\n'


def status(agent, *arguments):
    """Return what `status` prints, which must succeed."""
    code, out, err = agent.call("status", "--config", agent.config, *arguments)
    assert (code, err) == (0, "")
    return out


def status_json(agent, *arguments):
    (line,) = status(agent, "--json", *arguments).splitlines()
    return json.loads(line)


def sink_of(report, name):
    return next(sink for sink in report["sinks"] if sink["name"] == name)


def wait_for_status(agent, predicate):
    """Return the first report that *predicate* is true of; before its first commit an agent has none."""
    deadline = time.monotonic() + 30
    while True:
        code, out, err = agent.call("status", "--config", agent.config, "--json")
        if code == 0 and predicate(report := json.loads(out)):
            return report
        assert time.monotonic() < deadline, (out, err)


def test_a_running_agent_is_shown_with_what_it_sees_and_owes(agent, azure):
    agent.env["HTTP_PROXY"] = agent.env["http_proxy"] = "http://127.0.0.1:9"  # a proxy would ask another machine
    configure(agent, azure.endpoint)
    event_id = azure.world.add_event(EventSpec(event_type="Freeze", resources=("vm_1", "vm_0"), duration_seconds=5))
    agent.start()
    report = wait_for_status(agent, lambda report: report["agent"]["ready"] and sink_of(report, "stdout")["delivered"])
    assert set(report) == KEYS[""]
    for part in ("agent", "vm", "imds", "state"):
        assert set(report[part]) == KEYS[part]
    for part in ("events", "sinks"):
        assert [set(each) for each in report[part]] == [KEYS[part]]
    assert report["agent"]["running"] is True
    assert report["imds"]["last_good_poll_is_live"] is True
    assert report["imds"]["last_good_poll_seconds_ago"] < 5
    (event,) = report["events"]
    assert (event["event_id"], event["affects_this_vm"], event["resources"]) == (event_id, True, ["vm_1", "vm_0"])
    assert 800 < event["seconds_to_not_before"] <= 900
    assert event["last_transition"]["transition"] == "scheduled"
    sink = sink_of(report, "stdout")
    assert (sink["configured"], sink["accepted"], sink["pending"], sink["needs_attention"]) == (True, 1, 0, False)

    text = status(agent)
    assert text.startswith("The agent is running and ready.\n")
    assert re.search(r"^VM +vm_0$", text, re.MULTILINE)
    assert re.search(rf"^IMDS +{azure.endpoint}, last good poll \S+ \S+Z \([\d.]+ s ago\)$", text, re.MULTILINE)
    assert re.search(
        r"^Freeze +Scheduled +in 14 min \d+ s +\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ +this VM \+ 1$", text, re.MULTILINE
    )
    assert f"{event_id}  scheduled (observed)" in text
    assert re.search(r"^stdout +ok +0 +0 +1$", text, re.MULTILINE)
    assert "\x1b" not in text


def test_an_agent_that_was_stopped_or_killed_is_said_to_be_down_and_what_it_knew_is_shown(agent, azure, peer):
    configure(agent, azure.endpoint, webhook("alerts", f"{peer}/503"))
    azure.world.add_event(EventSpec(event_type="Redeploy", resources=("vm_0",)))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "alerts")["last_error"])
    agent.kill()
    for starts in (2, 3):
        text = status(agent)
        assert re.match(r"The agent is not running; this is what it knew at \S+ \S+Z \(.* ago\)\.\n", text)
        assert re.search(r"^Redeploy +Scheduled +in 9 min", text, re.MULTILINE)
        assert re.search(r"^alerts +failing +1 +\d+ s +0 +0$", text, re.MULTILINE)
        assert "answered 503" in text
        report = status_json(agent)
        assert (report["agent"]["running"], report["agent"]["ready"], report["agent"]["problem"]) == (False, None, None)
        assert (report["imds"]["last_good_poll_is_live"], sink_of(report, "alerts")["needs_attention"]) == (False, None)
        assert report["known_at"] < report["at"]
        agent.start()
        agent.wait_for(lambda starts=starts: agent.log.count("The agent is running.") == starts)
        assert agent.stop() == 0


def test_configuration_in_force_and_version_are_said(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    report = wait_for_status(agent, lambda report: report["agent"]["ready"])
    own = version("scheduled-events-bridge")
    assert report["configuration"] == {
        "file": str(agent.config), "looked_for": None, "agent_file": str(agent.config), "version": own,
    }  # fmt: skip
    lines = status(agent).splitlines()
    assert f"Config {agent.config}" in lines
    assert f"Agent  version {own}" in lines
    other = agent.directory / "other.toml"
    other.write_text(agent.config.read_text())
    code, out, err = agent.call("status", "--config", other)
    assert (code, err) == (0, "")
    assert f"Config {agent.config}" in out.splitlines()
    assert f"The agent runs on another configuration than this command has read ({other})" in out
    assert agent.stop() == 0
    lines = status(agent).splitlines()
    assert f"Config {agent.config}" in lines
    assert f"Agent  its version is not known; this command is version {own}" in lines


def test_that_there_is_no_configuration_is_said_with_where_it_was_looked_for(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert agent.stop() == 0
    if Path("/etc/scheduled-events-bridge/config.toml").exists():
        pytest.skip("This machine has a configuration of the service.")
    agent.env["STATE_DIRECTORY"] = str(agent.state)
    code, out, err = agent.call("status")
    assert (code, err) == (0, "")
    assert "Config none, so the defaults; looked for --config, $SCHEDULED_EVENTS_BRIDGE_CONFIG and /etc/" in out


def test_it_says_so_when_there_are_no_events(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert "There is no scheduled event." in status(agent)
    assert agent.stop() == 0
    assert "There was no scheduled event." in status(agent)


def test_six_events_come_soonest_first_and_each_says_whom_it_hits(agent, azure):
    configure(agent, azure.endpoint)
    for spec in (
        EventSpec(event_type="Terminate", notice_seconds=3 * 86_400 + 4_000, resources=("vm_0", "vm_1", "vm_2")),
        EventSpec(event_type="Freeze", resources=("vm_1", "vm_2")),
        EventSpec(event_type="Reboot", resources=("vm_0",), on_not_before="stay", notice_seconds=0),
        EventSpec(event_type="Freeze", status="Started", resources=("vm_0",), impact_seconds=10_000),
        EventSpec(event_type="Preempt", resources=("vm_0",), notice_seconds=500),
        EventSpec(event_type="Freeze", resources=(), notice_seconds=2_000),
    ):
        azure.world.add_event(spec)
    agent.start()
    wait_for_status(agent, lambda report: len(report["events"]) == 6)
    rows = [
        line for line in status(agent).splitlines() if re.match(r"(Freeze|Reboot|Redeploy|Preempt|Terminate) ", line)
    ]
    starts = [re.split(r" {2,}", row)[2] for row in rows]
    affects = [re.split(r" {2,}", row)[-1] for row in rows]
    assert [row.split()[0] for row in rows] == ["Freeze", "Reboot", "Preempt", "Freeze", "Freeze", "Terminate"]
    assert starts[0] == "under way"
    assert re.fullmatch(r"now|\d+ s ago", starts[1])
    assert re.fullmatch(r"in \d min \d+ s", starts[2])
    assert starts[5] == "in 3 d 1 h"
    expected = ["this VM", "this VM", "this VM", "2 other VMs", "no VM is named", "this VM + 2"]
    assert affects == expected


def test_broken_sinks_are_shown_with_their_last_error_and_what_to_do(agent, azure, peer, dead):
    sinks = (
        webhook("token", f"{peer}/401"),
        webhook("refuses", f"{peer}/422"),
        webhook("dead", dead),
        webhook("parks", f"{peer}/422") + "park_statuses = [422]\n",
    )
    configure(agent, azure.endpoint, "".join(sinks))
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    # One that has taken nothing yet and refuses what comes first may be the wrong endpoint: nothing is parked by it.
    report = wait_for_status(
        agent,
        lambda r: (
            r["agent"]["ready"] is False
            and all(sink["last_error"] for sink in r["sinks"])
            and [sink["needs_attention"] for sink in r["sinks"]] == [True, True, False, False]
        ),
    )
    assert any("token" in reason for reason in report["agent"]["reasons"])
    text = status(agent)
    assert text.startswith("The agent is running, but not ready:\n  Sink token needs a person")
    assert re.search(
        r"^token +needs a person +1 +\d+ s +0 +0\n  last error \S+ \S+Z \(.* ago\): .*401", text, re.MULTILINE
    )
    assert re.search(r"^refuses +needs a person +1 +\d+ s +0 +0\n  last error .*422", text, re.MULTILINE)
    assert re.search(r"^parks +refused some +0 +1 +0\n  last error .*422", text, re.MULTILINE)
    assert re.search(r"^dead +failing +1 .*\n  last error .*refused", text, re.MULTILINE)
    assert "`outbox retry`" in text
    assert agent.stop() == 0
    # Another configuration: two are gone from it, and one of those is owed something.
    configure(agent, azure.endpoint, webhook("new", f"{peer}/200") + sinks[1])
    report = status_json(agent)
    configured = {sink["name"]: sink["configured"] for sink in report["sinks"]}
    assert configured == {"new": True, "refuses": True, "dead": False, "token": False, "parks": False}
    text = status(agent)
    assert re.search(r"^dead +not configured +1 ", text, re.MULTILINE)
    assert "`outbox discard`" in text


def test_a_sink_that_is_gone_and_owed_nothing_is_not_shown_to_a_person(agent, azure, peer):
    configure(agent, azure.endpoint, webhook("old", f"{peer}/200"))
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "old")["delivered"])
    assert agent.stop() == 0
    configure(agent, azure.endpoint, webhook("new", f"{peer}/200"))
    assert not re.search("^old", status(agent), re.MULTILINE)
    assert sink_of(status_json(agent), "old")["configured"] is False


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (EventSpec(event_type="Freeze", on_approval="wait"), r"approved by rule:freeze .* ago; Azure has not started"),
        (EventSpec(event_type="Redeploy"), "rule:drain: its command runs before the event is approved"),
    ],
)
def test_an_approval_that_is_under_way_is_shown(agent, azure, spec, said):
    command = json.dumps([sys.executable, "-c", "import time; time.sleep(60)"])
    configure(
        agent,
        azure.endpoint,
        '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'
        '[[approval.rules]]\nname = "drain"\nevent_types = ["Redeploy"]\naction = "approve"\n'
        f"command_covers_all = true\ncommand = {command}\n",
    )
    azure.world.add_event(spec)
    agent.start()
    wait_for_status(
        agent, lambda r: r["events"] and (r["events"][0]["approval"] or {}).get("state") in {"posted", "draining"}
    )
    assert re.search(said, status(agent))


def test_an_agent_that_works_from_memory_is_said_to_and_its_own_counts_are_shown(agent, azure):
    configure(agent, azure.endpoint)
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "stdout")["delivered"] == 1)
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
    azure.world.add_event(EventSpec(event_type="Reboot"))
    report = wait_for_status(agent, lambda report: report["state"]["in_memory"])
    report = wait_for_status(agent, lambda report: sink_of(report, "stdout")["delivered"] == 2)
    assert [event["event_type"] for event in report["events"]] == ["Freeze"]
    text = status(agent)
    assert "It works from memory, because the disk under its outbox refuses writes" in text
    assert re.search(r"^stdout +ok +0 +0 +2$", text, re.MULTILINE)


def test_what_only_an_agent_in_memory_knows_is_not_called_nothing(agent, azure, peer):
    configure(agent, azure.endpoint, webhook("alerts", f"{peer}/200"))
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    code, out, err = agent.call("events", "-c", agent.config)
    assert (code, out, err) == (0, "", "No transition has been recorded yet.\n")
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
    azure.world.add_event(EventSpec(event_type="Reboot"))
    report = wait_for_status(agent, lambda report: report["state"]["in_memory"])
    assert report["events"] == []
    text = " ".join(status(agent).split())
    assert "Events are not known here: the agent works from memory because its disk refuses" in text
    assert "There is no scheduled event." not in text
    for options in ((), ("--json",)):
        code, out, err = agent.call("events", "-c", agent.config, *options)
        assert (code, out) == (0, "")
        assert err.startswith("Events are not known here: the agent works from memory")
        code, out, err = agent.call("outbox", "list", "-c", agent.config, *options)
        assert (code, out) == (0, "")
        assert err.startswith("What happened since its disk refuses is not known here")


def test_an_agent_that_is_still_loading_its_outbox_is_not_called_another_one(agent, azure):
    configure(agent, azure.endpoint)
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "stdout")["delivered"] == 1)
    assert agent.stop() == 0
    with closing(sqlite3.connect(agent.state / "outbox.db", isolation_level=None)) as another:
        another.execute("BEGIN IMMEDIATE")
        agent.start()
        report = wait_for_status(agent, lambda report: report["agent"]["version"])
        assert report["agent"]["problem"] is None
        assert (report["agent"]["running"], report["agent"]["ready"]) == (True, False)
        assert (report["state"]["loading"], report["state"]["in_memory"]) == (True, True)
        assert sink_of(report, "stdout")["delivered"] == 1  # what the outbox says, not the memory in its place
        assert [event["event_type"] for event in report["events"]] == ["Freeze"]
        text = " ".join(status(agent).split())
        assert "The agent is running, but not ready: The outbox is still being loaded" in text
        assert "It works from memory until its outbox is loaded." in text
        assert "another" not in text.replace("another program has", "")
        assert "refuses" not in text
    report = wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert (report["state"]["loading"], report["state"]["in_memory"]) == (False, False)


def test_records_from_before_the_disk_refused_are_said_not_to_be_the_newest(agent, azure):
    configure(agent, azure.endpoint)
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "stdout")["delivered"] == 1)
    followed, said = agent.directory / "followed", agent.directory / "said"
    with followed.open("wb") as stdout, said.open("wb") as stderr:
        process = agent.start_command("events", "--follow", "-c", agent.config, stdout=stdout, stderr=stderr)
    try:
        agent.wait_for(lambda: len(followed.read_text().splitlines()) == 2)
        assert said.read_text() == ""
        resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
        azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: said.read_text().startswith("Newer records are in memory only"))
    finally:
        process.kill()
        process.wait()
    code, out, err = agent.call("events", "-c", agent.config)
    assert (code, len(out.splitlines())) == (0, 2)
    assert err.startswith("Newer records are in memory only")
    code, out, err = agent.call("events", "--json", "-c", agent.config)
    assert [json.loads(line)["event"]["event_type"] for line in out.splitlines()] == ["Freeze"]
    assert err.startswith("Newer records are in memory only")


def readiness(**fields):
    sink = dict.fromkeys(("accepted", "delivered", "pending", "parked", "evicted", "discarded", "expired"), 77)
    return {
        "status": "ready",
        "reasons": [],
        "version": "0.1.0",
        "stream_id": "another",
        "state_directory": "/elsewhere",
        "state_in_memory": True,
        "vm": "somebody-else",
        "imds": "http://elsewhere",
        "last_good_poll_at": None,
        "last_good_poll_seconds_ago": None,
        "oldest_pending_seconds": 0.0,
        "sinks": {"stdout": {**sink, "oldest_pending_seconds": 0.0, "needs_attention": True}},
        **fields,
    }


def test_only_who_speaks_of_this_outbox_is_believed(agent, azure):
    configure(agent, azure.endpoint, listen="")
    agent.start()
    agent.wait_for(lambda: agent.state.exists() and "The agent is running." in agent.log)
    assert "status.listen is off" in status(agent)
    said = readiness()
    with answering(lambda _: (503, json.dumps(said).encode())) as port:
        configure(agent, azure.endpoint, listen=f"127.0.0.1:{port}")
        report = status_json(agent)
        assert report["agent"]["running"] is True  # it holds the directory
        assert report["agent"]["ready"] is None
        assert "another agent" in report["agent"]["problem"]
        assert "/elsewhere" in report["agent"]["problem"]
        assert (report["vm"]["name"], report["state"]["in_memory"]) == ("vm_0", False)
        assert sink_of(report, "stdout")["accepted"] == 0
        said["stream_id"] = report["state"]["stream_id"]
        report = status_json(agent)
        assert (report["agent"]["ready"], report["vm"]["name"]) == (True, "somebody-else")
        assert sink_of(report, "stdout")["accepted"] == 77


def test_copy_of_a_directory_is_not_taken_for_the_one_that_an_agent_holds(agent, azure, tmp_path):
    configure(agent, azure.endpoint, listen="")
    agent.start()
    agent.wait_for(lambda: agent.state.exists() and "The agent is running." in agent.log)
    copy = tmp_path / "copy"
    shutil.copytree(agent.state, copy)
    said = readiness() | {"stream_id": status_json(agent)["state"]["stream_id"]}
    with answering(lambda _: (200, json.dumps(said).encode())) as port:
        configure(agent, azure.endpoint, listen=f"127.0.0.1:{port}")
        code, out, _ = agent.call("status", "--json", "--config", agent.config, "--state-directory", copy)
        report = json.loads(out)
    assert (code, report["agent"]["running"], report["agent"]["ready"]) == (0, False, None)
    assert "another agent" in report["agent"]["problem"]


@pytest.mark.parametrize("moment", ["never", "2026-11-20T11:00:00"])
def test_answer_with_a_time_that_is_none_is_not_believed(agent, azure, moment):
    configure(agent, azure.endpoint, listen="")
    agent.start()
    agent.wait_for(lambda: agent.state.exists() and "The agent is running." in agent.log)
    said = readiness() | {"stream_id": status_json(agent)["state"]["stream_id"], "last_good_poll_at": moment}
    with answering(lambda _: (200, json.dumps(said).encode())) as port:
        configure(agent, azure.endpoint, listen=f"127.0.0.1:{port}")
        assert "is no agent of this kind" in status(agent)


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"status": 3}', b"\xff\xfe", b"[" * 100_000])
def test_what_answers_and_is_no_agent_is_said_and_not_believed(agent, azure, body):
    configure(agent, azure.endpoint, listen="")
    agent.start()
    agent.wait_for(lambda: "The agent is running." in agent.log)
    with answering(lambda _: (200, body)) as port:
        configure(agent, azure.endpoint, listen=f"127.0.0.1:{port}")
        report = status_json(agent)
    assert "no agent of this kind" in report["agent"]["problem"]
    assert report["agent"]["running"] is True


def test_a_listener_that_says_nothing_costs_a_second(agent, azure):
    configure(agent, azure.endpoint, listen="")
    agent.start()
    agent.wait_for(lambda: "The agent is running." in agent.log)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        configure(agent, azure.endpoint, listen=f"127.0.0.1:{silent.getsockname()[1]}")
        report = status_json(agent)
        assert "did not answer within 1 s" in report["agent"]["problem"]
        assert "did not answer within 1 s" in status(agent)


def test_who_looks_disturbs_nobody_and_is_not_taken_for_an_agent(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert agent.stop() == 0
    directory = os.open(agent.state, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_SH)  # as another `status` does for a moment
        assert status_json(agent)["agent"]["running"] is False
        fcntl.flock(directory, fcntl.LOCK_EX)
        report = status_json(agent)
        assert report["agent"]["running"] is True
        assert "Nobody answers at" in report["agent"]["problem"]
    finally:
        os.close(directory)
    before = {path.name: path.read_bytes() for path in agent.state.iterdir()}
    status(agent)
    assert {path.name: path.read_bytes() for path in agent.state.iterdir()} == before
    agent.start()
    agent.wait_for(lambda: agent.log.count("The agent is running.") == 2)


def test_files_that_matter_beside_the_outbox_are_shown(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert agent.stop() == 0
    (agent.state / "approvals.disabled").touch()
    for suffix in ("", "-wal", "-shm"):
        (agent.state / f"outbox.db.damaged-20261120T110000.000000Z{suffix}").write_bytes(b"x" * 10)
    text = status(agent)
    assert "approvals.disabled is there: nothing is approved" in text
    assert "1 database set aside, to be deleted when nobody needs them: outbox.db.damaged-20261120T110000" in text
    state = status_json(agent)["state"]
    assert state["approvals_disabled"] is True
    assert state["set_aside"] == [{"name": "outbox.db.damaged-20261120T110000.000000Z", "bytes": 10}]


def test_the_state_directory_is_enough_also_with_a_wrong_configuration(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert agent.stop() == 0
    agent.config.write_text("sinks = 3")
    code, out, err = agent.call("status", "--config", agent.config)
    assert (code, out) == (78, "")
    assert "--state-directory" in err
    report = status_json(agent, "--state-directory", agent.state)
    assert "configuration is wrong" in report["configuration_problem"]
    assert sink_of(report, "stdout")["configured"] is None
    code, out, err = agent.call("status", "--state-directory", agent.state)
    assert (code, err) == (0, "")
    assert "name it with --config" in out


def test_no_outbox_and_one_that_cannot_be_read_are_exit_1_with_a_sentence(agent, azure):
    code, out, err = agent.call("status", "--state-directory", agent.directory / "nowhere")
    assert (code, out) == (1, "")
    assert err.startswith("There is no outbox in ")
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert agent.stop() == 0
    database = agent.state / "outbox.db"
    for content, said in (
        (b"garbage" * 1_000, "damaged"),
        (b"", "holds nothing"),
        (database.read_bytes()[:5_000], "damaged"),
    ):
        database.write_bytes(content)
        for options in ((), ("--json",)):
            code, out, err = agent.call("status", "--config", agent.config, *options)
            assert (code, out) == (1, "")
            assert said in err
            assert len(err.splitlines()) == 1


def test_a_damaged_outbox_under_a_running_agent_says_that_it_runs(agent, azure):
    configure(agent, azure.endpoint, listen="")
    agent.start()
    agent.wait_for(lambda: "The agent is running." in agent.log)
    other = agent.directory / "other"
    shutil.copytree(agent.state, other)
    (other / "outbox.db").write_bytes(b"garbage" * 1_000)
    (other / "outbox.db-wal").unlink(missing_ok=True)  # all would still be in it
    directory = os.open(other, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        code, _, err = agent.call("status", "--state-directory", other)
    finally:
        os.close(directory)
    assert code == 1
    assert err.endswith("An agent runs on it.\n")


def test_somebody_who_may_not_read_it_is_told_whom_to_ask_as(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    assert agent.stop() == 0
    for path in (agent.state / "outbox.db", agent.state):
        path.chmod(0)
        try:
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, "status", "--state-directory", str(agent.state)],
                check=False,
                capture_output=True,
                text=True,
                env=agent.env,
                cwd=agent.directory,
                timeout=60,
            )
        finally:
            path.chmod(0o700)
        assert done.returncode == 1
        assert "root" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("no_colour", [False, True])
def test_on_a_terminal_it_has_colours_unless_unwanted_and_fits_its_width(agent, azure, peer, columns, no_colour):
    configure(agent, azure.endpoint, webhook("token", f"{peer}/401"))
    azure.world.add_event(EventSpec(event_type="Terminate", resources=("vm_0", "vm_1", "vm_2"), duration_seconds=5))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "token")["last_error"])
    text = on_a_terminal(agent, columns, {"NO_COLOR": "1"} if no_colour else {})
    assert ("\x1b[" in text) is not no_colour
    assert not re.search(r"\x1b\[[0-9;]*[39][346]m", text)  # blue, yellow, cyan: pale on a dark or a light ground
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("Terminate  Scheduled  in ") for line in lines)


def on_a_terminal(agent, columns, more):
    """Return what `status` writes to a terminal of so many columns."""
    pty = pytest.importorskip("pty")
    here, there = pty.openpty()
    try:
        with agent.err.open("ab") as err:
            size = {"COLUMNS": str(columns), "LINES": "50"}
            process = agent.start_command("status", "--config", agent.config, stdout=there, stderr=err, **size, **more)
        os.close(there)
        chunks = []
        try:
            while chunk := os.read(here, 65_536):
                chunks.append(chunk)
        except OSError:  # Linux says so when the other end is closed
            pass
        assert process.wait(60) == 0
    finally:
        os.close(here)
    return b"".join(chunks).decode()


def test_times_in_lists_have_a_zone_and_are_iso_8601_in_json(agent, azure, peer):
    configure(agent, azure.endpoint, webhook("alerts", f"{peer}/503"))
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "alerts")["last_error"])
    code, out, _ = agent.call("outbox", "list", "-c", agent.config)
    header, row = out.splitlines()
    assert code == 0
    assert header.split()[4:6] == ["OBSERVED", "CHANGED"]
    assert len(re.findall(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", row)) == 2
    _, out, _ = agent.call("outbox", "list", "-c", agent.config, "--json")
    row = json.loads(out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row["changed_at"])
    assert row["record"]["observed_at"] <= row["changed_at"]
    _, out, _ = agent.call("events", "-c", agent.config)
    assert len(re.findall(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", out)) == 2  # observed, and NotBefore


def test_events_that_are_followed_stay_under_their_header(agent, azure):
    configure(agent, azure.endpoint)
    agent.start()
    wait_for_status(agent, lambda report: report["agent"]["ready"])
    followed = agent.directory / "followed"
    with followed.open("wb") as out, agent.err.open("ab") as err:
        process = agent.start_command(
            "events", "--follow", "--type", "Freeze", "-c", agent.config, stdout=out, stderr=err
        )
    try:
        azure.world.add_event(EventSpec(event_type="Reboot"))
        event_id = azure.world.add_event(EventSpec(event_type="Freeze"))
        agent.wait_for(lambda: len(followed.read_text().splitlines()) == 2)
        azure.world.start(event_id)
        agent.wait_for(lambda: len(followed.read_text().splitlines()) == 3)
    finally:
        process.kill()
        process.wait()
    header, *rows = followed.read_text().splitlines()
    assert not any("Reboot" in row for row in rows)
    for column in ("OBSERVED", "TRANSITION", "EVIDENCE", "TYPE", "RESOURCES"):
        at = header.index(column)
        assert {row[at - 1] for row in rows} == {" "}
        assert all(row[at] != " " for row in rows)


def test_the_glance_has_what_the_lists_have(agent, azure, peer):
    configure(agent, azure.endpoint, webhook("alerts", f"{peer}/503"))
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "alerts")["last_error"])
    assert agent.stop() == 0
    with OutboxFile(agent.state) as beside:
        glance = beside.snapshot()
        (row,) = beside.deliveries("alerts")
        assert glance.sinks == beside.accounts()
        assert glance.last_errors["alerts"].message == row.error
        assert glance.stored == beside.state()
        (records,) = glance.last_records.values()
        assert list(records) == beside.records()
