"""`status`, `events`, and `outbox` with a running agent, a stopped agent, and a hung agent."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from readable_source import readable_source

from bridge.agent.control_requests import Source, read_status
from bridge.testing import EventSpec, Simulator
from bridge.testing.http_contract import Answer, HttpPeer

resource = pytest.importorskip("resource", reason="Windows has no limits for files")

KEYS = {
    "": {
        *("schema_version", "at", "known_at", "agent", "vm", "last_good_poll_at", "state"),
        *("configuration", "active_event_ids", "events", "last_ending", "sinks"),
    },
    "configuration": {
        *("file", "looked_for", "problem", "sinks", "vm_name", "imds_endpoint", "max_bytes"),
        *("approvals_unsafe", "unusable_keys"),
    },
    "state": {"directory", "stream_id", "approvals_disabled", "outbox_bytes", "kept_files"},
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
#: Runs a command as the user `nobody`. The modules are imported first, because `nobody` might be unable to read them.
AS_NOBODY = """
import os, sys, bridge.cli.commands, bridge.cli.status, bridge.cli.outbox, bridge.outbox.outbox
import encodings.idna, encodings.utf_8_sig, pwd
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
bridge.cli.main()
"""
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root changes users")


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0", "vm_1", "vm_2"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def peer():
    """An endpoint that responds to each request with the status in the path."""
    with HttpPeer() as peer:
        peer.reply(lambda request: Answer(status=int(request.path.strip("/")), body=b"the reason of the endpoint"))
        yield f"http://{peer.address.authority}"


def webhook(name, url):
    return f'[[sinks]]\ntype = "webhook"\nname = "{name}"\nurl = "{url}"\n'


def status(agent, *arguments):
    """Return the output of `status`, which must succeed."""
    code, out, err = agent.call("status", "--config", agent.config, *arguments)
    assert (code, err) == (0, "")
    return out


def status_json(agent, *arguments):
    (line,) = status(agent, "--json", *arguments).splitlines()
    return json.loads(line)


def sink_of(report, name):
    return next(sink for sink in report["sinks"] if sink["name"] == name)


def wait_for_status(agent, predicate):
    """Return the first report for which *predicate* is true."""
    deadline = time.monotonic() + 30
    while True:
        code, out, err = agent.call("status", "--config", agent.config, "--json")
        if code == 0 and predicate(report := json.loads(out)):
            return report
        assert time.monotonic() < deadline, (out, err)


def is_ready(report):
    """Return whether the agent is ready and has an outbox file, which a busy disk can delay."""
    is_saved = report["state"]["outbox_bytes"] > 0
    return is_saved and report["agent"] is not None and report["agent"]["status"] == "ready"


def test_status_shows_events_and_sinks_of_a_running_agent(agent, azure):
    agent.configure(azure.endpoint)
    event_id = azure.world.add_event(EventSpec(event_type="Freeze", resources=("vm_1", "vm_0"), duration_seconds=5))
    agent.start()
    report = wait_for_status(agent, lambda report: is_ready(report) and sink_of(report, "stdout")["delivered"])
    assert set(report) == KEYS[""]
    for part in ("state", "configuration"):
        assert set(report[part]) == KEYS[part]
    for part in ("events", "sinks"):
        assert [set(each) for each in report[part]] == [KEYS[part]]
    assert report["agent"]["reasons"] == []
    assert report["agent"]["version"] == version("scheduled-events-bridge")
    assert report["agent"]["outbox_behind"] is None
    assert report["agent"]["last_good_poll_seconds_ago"] < 5
    assert report["vm"]["name"] == "vm_0"
    assert report["active_event_ids"] == [event_id]
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


def test_status_shows_the_stored_state_after_a_kill_and_after_a_stop(agent, azure, peer):
    agent.configure(azure.endpoint, webhook("alerts", f"{peer}/503"))
    azure.world.add_event(EventSpec(event_type="Redeploy", resources=("vm_0",)))
    agent.start()
    wait_for_status(agent, is_ready)
    agent.wait_for(
        lambda: read_status(Source(agent.state)).last_errors
    )  # The saver stores a result after a short delay.
    agent.kill()
    for starts in (2, 3):
        text = status(agent)
        assert re.match(r"The agent is not running\. The last saved change was at \S+ \S+Z \(.* ago\)\.\n", text)
        assert re.search(r"^Redeploy +Scheduled +in 9 min", text, re.MULTILINE)
        assert re.search(r"^alerts +failing +1 +\d+ s +0 +0$", text, re.MULTILINE)
        assert "503" in text
        report = status_json(agent)
        assert (report["agent"], report["active_event_ids"]) == (None, None)
        assert report["known_at"] < report["at"]
        before = {path.name: path.read_bytes() for path in agent.state.iterdir() if path.suffix != ".sock"}
        status(agent)
        if starts == 3:  # a reader of the WAL of a killed agent uses its shared memory
            assert {path.name: path.read_bytes() for path in agent.state.iterdir()} == before
        agent.start()
        agent.wait_for(lambda starts=starts: agent.log.count("The agent is running.") == starts)
        assert agent.stop() == 0


def test_status_shows_the_configuration_and_the_version(agent, azure):
    agent.configure(azure.endpoint)
    agent.start()
    report = wait_for_status(agent, is_ready)
    own = version("scheduled-events-bridge")
    assert report["configuration"]["file"] == report["agent"]["configuration"] == str(agent.config)
    lines = status(agent).splitlines()
    assert f"Config {agent.config}" in lines
    assert f"Agent  version {own}" in lines
    other = agent.directory / "other.toml"
    other.write_text(agent.config.read_text())
    code, out, err = agent.call("status", "--config", other)
    assert (code, err) == (0, "")
    assert f"Config {agent.config}" in out.splitlines()
    assert f"This command uses another configuration ({other}) than the agent." in out
    assert "No scheduled events.\n" in out
    assert agent.stop() == 0
    lines = status(agent).splitlines()
    assert f"Config {agent.config}" in lines
    assert "No scheduled events when the agent stopped." in lines
    if Path("/etc/scheduled-events-bridge/config.toml").exists():
        pytest.skip("This machine has a configuration of the service.")
    agent.env["STATE_DIRECTORY"] = str(agent.state)
    code, out, err = agent.call("status")
    assert (code, err) == (0, "")
    assert "Config none" in out
    assert "/etc/scheduled-events-bridge/config.toml" in out


def test_status_sorts_events_by_time_and_shows_the_affected_vms(agent, azure):
    agent.configure(azure.endpoint)
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
        re.split(r" {2,}", line)
        for line in status(agent).splitlines()
        if re.match(r"(Freeze|Reboot|Redeploy|Preempt|Terminate) ", line)
    ]
    assert [row[0] for row in rows] == ["Freeze", "Reboot", "Preempt", "Freeze", "Freeze", "Terminate"]
    assert rows[0][2] == "started"
    assert re.fullmatch(r"now|[\d.]+ s ago", rows[1][2])
    assert re.fullmatch(r"in \d min \d+ s", rows[2][2])
    assert rows[5][2] == "in 3 d 1 h"
    assert [row[-1] for row in rows] == [
        "this VM", "this VM", "this VM", "2 other VMs", "no VM named", "this VM + 2",
    ]  # fmt: skip


def test_status_shows_failing_sinks_with_the_error_and_the_next_step(agent, azure, peer):
    sinks = (
        webhook("token", f"{peer}/401"),
        webhook("refuses", f"{peer}/422"),
        webhook("parks", f"{peer}/422") + "park_statuses = [422]\n",
    )
    agent.configure(azure.endpoint, "".join(sinks))
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    # A sink that has accepted nothing yet may have the wrong endpoint, so nothing is parked.
    report = wait_for_status(
        agent,
        lambda report: (
            report["agent"] is not None
            and all(sink["last_error"] for sink in report["sinks"])
            and [sink["needs_attention"] for sink in report["sinks"]] == [True, True, False]
        ),
    )
    assert any("token" in reason for reason in report["agent"]["reasons"])
    text = status(agent)
    assert text.startswith("The agent is running, but not ready:\n  Sink token needs attention.")
    assert re.search(r"^token +needs attention +1 +\d+ s +0 +0\n  last error \S+ \S+Z .*: .*401", text, re.MULTILINE)
    assert re.search(r"^refuses +needs attention +1 +\d+ s +0 +0\n  last error .*422", text, re.MULTILINE)
    assert re.search(r"^parks +has parked +0 +1 +0\n  last error .*422", text, re.MULTILINE)
    assert "`outbox retry`" in text
    assert agent.stop() == 0


def test_records_of_a_renamed_sink_are_reported_and_moved(agent, azure, peer):
    """Issue: after a sink was renamed, its records stayed with the old name, and nothing reported them."""
    agent.configure(azure.endpoint, webhook("old", f"{peer}/503"))
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "old")["last_error"])
    assert agent.stop() == 0
    agent.configure(azure.endpoint, webhook("new", f"{peer}/200") + webhook("other", f"{peer}/503"))
    agent.start()
    agent.wait_for(lambda: agent.log.count("The agent is running.") == 2)
    report = wait_for_status(agent, is_ready)
    assert {sink["name"]: sink["configured"] for sink in report["sinks"]} == {"new": True, "other": True, "old": False}
    text = status(agent)
    assert re.search(r"^old +not configured +1 ", text, re.MULTILINE)
    assert "run `outbox move old NEW`" in text
    code, _, err = agent.call("outbox", "retry", "--sink", "old", "--config", agent.config)
    assert (code, "The sink old is not in the agent's configuration" in err) == (1, True)
    code, _, err = agent.call("outbox", "move", "old", "new", "--config", agent.config)
    assert code == 0, err
    assert re.search("records? moved from old to new", err)
    report = wait_for_status(agent, lambda report: sink_of(report, "new")["pending"] == 0)
    assert (sink_of(report, "old")["pending"], sink_of(report, "old")["discarded"]) == (0, 1)
    assert not re.search("^old", status(agent), re.MULTILINE)
    code, _, err = agent.call("outbox", "move", "old", "unknown", "--config", agent.config)
    assert (code, err) == (1, "Unknown sink 'unknown'. Known sinks: old, new, other.\n")


def test_status_hides_sinks_that_the_agent_has_not_loaded(agent, azure, peer):
    agent.configure(azure.endpoint, webhook("loaded", f"{peer}/200"))
    agent.start()
    wait_for_status(agent, is_ready)
    agent.configure(azure.endpoint, webhook("written", f"{peer}/200"))
    report = json.loads(status(agent, "--json"))
    assert [sink["name"] for sink in report["sinks"]] == ["loaded"]
    assert "The agent has not loaded the sinks of this file." in " ".join(status(agent).split())


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (EventSpec(event_type="Freeze", on_approval="wait"), r"posted .* ago, requested by rule:freeze"),
        (EventSpec(event_type="Redeploy"), r"draining .* ago, requested by rule:drain"),
    ],
)
def test_status_shows_an_approval_in_progress(agent, azure, spec, shown):
    command = json.dumps([sys.executable, "-c", "import time; time.sleep(60)"])
    agent.configure(
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
    assert re.search(shown, status(agent))


def test_status_reports_an_unsaved_outbox_and_shows_the_newest_records(agent, azure):
    agent.configure(azure.endpoint)
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "stdout")["delivered"] == 1)
    # Enough for the output of the sink, but not for the outbox.
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (8_192, resource.RLIM_INFINITY))
    azure.world.add_event(EventSpec(event_type="Reboot"))
    report = wait_for_status(agent, lambda report: report["agent"]["outbox_behind"])
    assert report["agent"]["outbox_behind_seconds"] >= 0
    assert report["agent"]["status"] == "not_ready"
    report = wait_for_status(agent, lambda report: sink_of(report, "stdout")["delivered"] == 2)
    assert sorted(event["event_type"] for event in report["events"]) == ["Freeze", "Reboot"]
    assert re.search(r"The outbox is not saved for \d+ s: .* The agent continues from memory", status(agent))
    code, out, err = agent.call("events", "--json", "-c", agent.config)
    assert [json.loads(line)["event"]["event_type"] for line in out.splitlines()] == ["Freeze", "Reboot"]
    assert (code, err) == (0, "")
    code, _, err = agent.call("outbox", "retry", "-c", agent.config)
    assert (code, "could not save it" in err) == (1, True)
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_for_status(agent, lambda report: report["agent"]["outbox_behind"] is None)


def test_status_reports_the_process_id_of_a_hung_agent(agent, azure):
    agent.configure(azure.endpoint, "[approval]\n")
    agent.start()
    wait_for_status(agent, is_ready)
    agent.process.send_signal(signal.SIGSTOP)
    try:
        began_at = time.monotonic()
        code, out, err = agent.call("status", "--config", agent.config)
        assert (code, out) == (1, "")
        assert f"process {agent.process.pid}" in err
        assert len(err.splitlines()) == 1
        assert time.monotonic() - began_at < 8
    finally:
        agent.process.send_signal(signal.SIGCONT)
    wait_for_status(agent, is_ready)


@pytest.fixture
def public_directory():
    """A directory that every user may enter, unlike the directories of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@needs_root
def test_other_users_are_denied_and_root_creates_no_root_owned_files(agent, azure, public_directory):
    agent.state = public_directory / "state"
    agent.configure(azure.endpoint)
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    wait_for_status(agent, lambda report: sink_of(report, "stdout")["delivered"])
    commands = (("status",), ("outbox", "list"), ("outbox", "retry"))
    for is_running in (True, False):
        for mode in (0o700, 0o755):
            agent.state.chmod(mode)
            for command in commands:
                done = subprocess.run(
                    [sys.executable, "-c", AS_NOBODY, *command, "--state-directory", str(agent.state)],
                    check=False,
                    capture_output=True,
                    text=True,
                    env={**agent.env, "PYTHONPATH": readable_source()},
                    cwd=agent.directory,
                    timeout=60,
                )
                assert done.returncode == 1, done.stderr
                assert re.search(r"Run the command as root, with sudo, or as (that|the agent's) user\.", done.stderr)
                assert len(done.stderr.splitlines()) == 1, done.stderr
        if is_running:
            assert agent.stop() == 0
    for path in (*agent.state.iterdir(), agent.state):
        os.chown(path, 54_321, 54_321)  # a user without a name, as in a container
    for command in commands:
        code, _, err = agent.call(*command, "--state-directory", agent.state)
        assert code == 0, err
    assert {path.stat().st_uid for path in agent.state.iterdir()} == {54_321}


def test_status_shows_kept_outbox_files_and_the_approvals_switch(agent, azure):
    agent.configure(azure.endpoint)
    agent.start()
    wait_for_status(agent, is_ready)
    (agent.state / "outbox-1.db").write_bytes(b"garbage" * 1_000)
    wait_for_status(agent, lambda report: report["state"]["kept_files"] == ["outbox-1.db"])
    (agent.state / "approvals.disabled").touch()
    text = status(agent)
    assert "1 older outbox file kept: outbox-1.db." in text
    assert "Nothing is approved, because the file approvals.disabled exists." in text
    assert status_json(agent)["state"]["approvals_disabled"] is True


def test_state_directory_option_replaces_an_invalid_configuration(agent, azure):
    agent.configure(azure.endpoint)
    agent.start()
    wait_for_status(agent, is_ready)
    assert agent.stop() == 0
    agent.config.write_text("sinks = 3")
    code, out, err = agent.call("status", "--config", agent.config)
    assert (code, out) == (78, "")
    code, out, err = agent.call("status", "--state-directory", agent.state)
    assert (code, err) == (0, "")
    assert "Use --config to name the configuration of this directory." in out
    code, out, err = agent.call("status", "--state-directory", agent.directory / "nowhere")
    assert (code, out) == (1, "")
    assert "contains no outbox" in err


def test_followed_events_stay_aligned_across_a_restart_of_the_agent(agent, azure):
    agent.configure(azure.endpoint)
    agent.start()
    wait_for_status(agent, is_ready)
    followed = agent.directory / "followed"
    with followed.open("wb") as out, agent.err.open("ab") as err:
        process = agent.start_command(
            "events", "--follow", "--type", "Freeze", "-c", agent.config, stdout=out, stderr=err
        )
    try:
        azure.world.add_event(EventSpec(event_type="Reboot"))
        event_id = azure.world.add_event(EventSpec(event_type="Freeze"))
        agent.wait_for(lambda: len(followed.read_text().splitlines()) == 2)
        assert agent.stop() == 0
        agent.start()
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
