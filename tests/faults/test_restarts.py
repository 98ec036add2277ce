"""Restarts with a different machine, clock, or files: no record is lost, forged, or duplicated.

At the end of each test, the portal must show open events as open and ended events as ended.
"""

import json
import shutil
import signal
import sqlite3
import time
from contextlib import closing, contextmanager, nullcontext

import msgspec
import preload
import pytest
from agent_stage import APPROVE_ALL, NOTHING, Stage, judge, open_in_fold
from loop_disk import loop_disk
from portal_stub import PortalStub

from bridge.imds.document import parse_document
from bridge.testing.simulator.imds_api import Answer

UNKNOWN = Answer(status=503)
FIRST, CLONE = (Answer(body=json.dumps({"name": "vm_0", "vmId": vm_id}).encode()) for vm_id in ("AAAA", "BBBB"))
HOUR = 3600
DAY = 24 * HOUR


@contextmanager
def opened(directory, env, **options):
    runtime = directory / "runtime"
    runtime.mkdir()
    stage = Stage(directory, {**env, "RUNTIME_DIRECTORY": str(runtime)}, **options)
    try:
        yield stage
    finally:
        stage.close()


@pytest.fixture
def stage(tmp_path, agent_env):
    with opened(tmp_path, agent_env) as stage:
        yield stage


@pytest.fixture
def timed_stage(tmp_path, agent_env, tmp_path_factory):
    """Return a stage whose agent can start with another wall clock."""
    library = preload.built(tmp_path_factory, preload.FAULTS)
    with opened(tmp_path, agent_env, preload=library) as stage:
        yield stage


def kill_and_compare(stage, **env):
    """Kill the agent, start it again, and compare the records of both sinks with the events and the portal's fold."""
    stage.kill()
    stage.waiting.accepts = True
    stage.start(**env)
    stage.wait_until_settled()
    stage.wait_for_records(stage.waiting)
    for receiver in (stage.healthy, stage.waiting):
        assert judge(stage.expected(), receiver.records) == NOTHING
        assert_fold(receiver.records, stage.azure.events)


def assert_fold(records, open_events):
    """Compare the portal's view with the open events, if the libraries of the portal are installed."""
    assert open_in_fold(records) in (None, set(open_events))


# The machine.


def reboot(stage):
    """Change the boot ID of the stored state, as after a reboot or in an image."""
    with closing(sqlite3.connect(stage.newest_file, isolation_level=None)) as connection:
        boot_ids = "UPDATE meta SET value = 'another boot' WHERE key IN ('boot_id', 'vm_boot_id')"
        assert connection.execute(boot_ids).rowcount


def start_clone(stage):
    """Start the agent with the state of another machine, with its own events, and without an identity."""
    stage.start()
    stage.change(with_endings=False)
    stage.wait_until_settled()
    stage.kill()
    reboot(stage)
    before = len(stage.healthy.records)
    stage.azure.identity = UNKNOWN
    del stage.azure.events["E-1"]
    stage.azure.announce("P-1", EventType="Preempt", Resources=["vm_0"])
    stage.azure.announce("E-7")
    stage.waiting.accepts = True
    posted = stage.azure.approved()
    stage.start()
    stage.wait(lambda: len(stage.healthy.records) > before and stage.waiting.records)
    stage.wait_for_polls(10, 20)
    assert stage.azure.approved() == posted, "the agent approved an event before the machine was known"
    urgent = [*stage.healthy.records[before:], *stage.waiting.records]
    assert {record["event"]["event_id"] for record in urgent} == {"P-1"}
    return before


def test_clone_with_a_late_identity_sends_no_events_of_the_source_vm(stage):
    before = start_clone(stage)
    stage.azure.identity = CLONE
    expected = {("E-7", "scheduled"), ("P-1", "scheduled"), ("E-7", "approved"), ("P-1", "approved")}
    stage.wait(lambda: expected <= stage.waiting.transitions())
    stage.wait(stage.is_saved)
    stage.kill()
    stage.start()
    stage.wait_for_polls(5)
    for records in (stage.healthy.records[before:], stage.waiting.records):
        found = judge(expected, records)
        # The identity is part of the ID, so an urgent record that was sent without it may be sent once more.
        assert found["two ids"] in ([], [("P-1", "scheduled")])
        assert {**found, "two ids": []} == NOTHING
        assert {record["vm"]["vm_id"] for record in records} <= {None, "BBBB"}
        assert_fold([record for record in records if record["vm"]["vm_id"]], stage.azure.events)


def test_clone_without_an_identity_sends_only_urgent_events(stage):
    before = start_clone(stage)
    time.sleep(3)
    assert {record["event"]["event_id"] for record in stage.healthy.records[before:]} == {"P-1"}
    assert {record["event"]["event_id"] for record in stage.waiting.records} == {"P-1"}
    # The identity shows that it is the same machine, so the agent sends its stored records.
    stage.kill()
    stage.azure.identity = FIRST
    stage.start()
    stage.wait(lambda: {("E-1", "scheduled"), ("E-7", "scheduled")} <= stage.waiting.transitions())


# The files.


@pytest.mark.parametrize("has_portal", [True, False], ids=["with a portal", "without a portal"])
def test_lost_hold_in_a_restored_backup_is_recovered_only_from_a_portal(tmp_path, agent_env, has_portal):
    """With a portal, the agent approves nothing until it has all decisions. Without a portal, the hold is lost."""
    with (
        PortalStub(tmp_path / "portal") as portal,
        opened(tmp_path, agent_env, approval=f"[approval]\n{APPROVE_ALL}{portal.toml()}") as stage,
    ):
        stage.azure.announce("E-1")
        event = parse_document(stage.azure.document()).events[0]
        stage.azure.events.clear()
        stage.azure.changed_at.clear()
        stage.start()
        stage.wait_until_settled()
        shutil.copytree(stage.state, tmp_path / "backup", ignore=shutil.ignore_patterns("*.sock", "*-shm"))
        portal.decide(event, vm_id="AAAA", decision="hold")
        stage.wait(lambda: any(request.index > 1 for request in portal.requests))
        stage.azure.announce("E-1")
        stage.wait_for_polls(5)
        stage.kill()
        shutil.rmtree(stage.state)
        shutil.copytree(tmp_path / "backup", stage.state)
        portal.down()
        if not has_portal:
            stage.configure(f"[approval]\n{APPROVE_ALL}")
        stage.start()
        stage.azure.announce("E-2")
        if not has_portal:
            stage.wait(lambda: stage.azure.approved() == {"E-1", "E-2"})
            return
        stage.wait_for_polls(10)
        assert stage.azure.approved() == set()
        portal.up()
        stage.wait(stage.azure.approved)
        stage.wait_for_polls(5)
        assert stage.azure.approved() == {"E-2"}
        assert_fold(stage.healthy.records, stage.azure.events)


def test_events_stay_open_after_a_kill_and_an_emptied_runtime_directory(stage):
    stage.start()
    stage.change(with_endings=False)
    stage.wait_until_settled()
    stage.kill()
    shutil.rmtree(stage.directory / "runtime")
    (stage.directory / "runtime").mkdir()
    stage.start()
    stage.change(with_endings=False)
    stage.wait_until_settled()
    kill_and_compare(stage)
    pytest.importorskip("sqlalchemy", reason="needs the extra [portal]")
    assert open_in_fold(stage.healthy.records) == {"E-1", "E-2"}


# The clock.


def test_event_that_reappears_after_a_restart_is_recorded_twice(timed_stage):
    stage = timed_stage
    stage.start()
    stage.azure.begin("E-1")
    stage.wait_until_settled()
    stage.azure.end("E-1")
    stage.wait_until_settled()
    stage.kill()
    stage.azure.begin("E-1")
    stage.start()
    stage.wait(lambda: count(stage.healthy, "started") == 2)
    stage.wait(stage.is_saved)
    assert_fold(stage.healthy.records, ["E-1"])
    stage.kill()
    stage.azure.end("E-1")
    stage.start(CLOCK_OFFSET=str(HOUR))  # An event that has just reappeared ends only after five minutes.
    stage.wait(lambda: count(stage.healthy, "completed") == 2)
    stage.wait(stage.is_saved)
    stage.kill()
    stage.waiting.accepts = True
    stage.start(CLOCK_OFFSET=str(HOUR))
    stage.wait(lambda: count(stage.waiting, "completed") == 2)
    for receiver in (stage.healthy, stage.waiting):
        assert {what: count(receiver, what) for what in ("started", "completed")} == {"started": 2, "completed": 2}
        assert_fold(receiver.records, [])


def count(receiver, transition):
    """Return the number of different records with this transition."""
    return len({record["id"] for record in receiver.records if record["transition"] == transition})


def test_records_stay_in_order_if_the_clock_is_set_back_during_a_restart(timed_stage):
    stage = timed_stage
    stage.start()
    for _ in range(4):
        stage.change()
    stage.wait_until_settled()
    stage.kill()
    stage.start(CLOCK_OFFSET=str(-DAY))
    for _ in range(4):
        stage.change()
    stage.wait_until_settled()
    kill_and_compare(stage, CLOCK_OFFSET=str(-DAY))
    streams = list(dict.fromkeys(record["stream_id"] for record in stage.healthy.records))
    assert streams == sorted(streams)


def test_event_that_ended_during_an_hour_of_downtime_is_inferred(timed_stage):
    stage = timed_stage
    stage.start()
    stage.azure.begin("E-1")
    stage.azure.announce("E-2")
    stage.wait_until_settled()
    stage.kill()
    stage.azure.end("E-1")
    stage.azure.announce("E-3")
    stage.start(CLOCK_OFFSET=str(HOUR))
    stage.wait_until_settled()
    kill_and_compare(stage, CLOCK_OFFSET=str(HOUR))
    (ending,) = {
        record["id"]: record for record in stage.healthy.records if record["transition"] == "completed"
    }.values()
    assert (ending["event"]["event_id"], ending["evidence"]) == ("E-1", "inferred")


# The measured impact.


def test_suspended_agent_is_reported_as_a_stall_not_as_a_pause(stage):
    stage.start()
    stage.azure.begin("E-1")
    stage.wait_until_settled()
    stage.process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    stage.process.send_signal(signal.SIGCONT)
    stage.wait_for_polls(5)
    stage.azure.end("E-1")
    stage.wait_until_settled()
    (ending,) = [record for record in stage.healthy.records if record["transition"] == "completed"]
    impact = ending["impact"]
    assert impact["agent_stalled_seconds"] == pytest.approx(5.0, abs=0.7)
    assert [pause for pause in impact["pauses"] if pause["seconds"] is None or pause["seconds"] > 1] == []
    assert [each["transition"] for each in ending["timeline"]] == ["started"]


def test_agent_restart_during_an_event_lowers_the_impact_coverage(stage):
    stage.start()
    stage.azure.begin("E-1")
    stage.wait_until_settled()
    time.sleep(2)
    stage.kill()
    stage.start()
    stage.wait_for_polls(5)
    stage.azure.end("E-1")
    stage.wait_until_settled()
    (ending,) = {each["id"]: each for each in stage.healthy.records if each["transition"] == "completed"}.values()
    assert 0 <= ending["impact"]["coverage"] < 1
    assert ending["impact"]["longest_seconds"] is None or ending["impact"]["pauses"]


@pytest.mark.parametrize("how", ["the agent is killed", "the host crashes and loses unsynced pages"])
def test_downtime_of_a_reboot_is_within_its_uncertainty(tmp_path, agent_env, how):
    with loop_disk(tmp_path / "disk") as disk, opened(tmp_path, agent_env, state=disk.path / "state") as stage:
        stage.start()
        stage.azure.begin("E-1", EventType="Reboot")
        stage.wait_until_settled()
        stamp = stage.state / "last-sign-of-life"
        stage.wait(stamp.exists)
        time.sleep(1.5)
        crashed_at = time.monotonic()
        with disk.crash_of_the_host() if "host" in how else nullcontext():
            stage.kill()
        reboot(stage)
        stamp.write_bytes(msgspec.json.encode({**json.loads(stamp.read_bytes()), "boot_id": "another boot"}))
        time.sleep(3)
        started_at = time.monotonic()
        stage.start()
        stage.wait_for_polls(1)
        polled_at = next(at for at in stage.azure.polled_at if at > started_at)
        stage.azure.end("E-1")
        stage.wait_until_settled()
        impact = next(each["impact"] for each in stage.healthy.records if each["transition"] == "completed")
        uncertainty = impact["downtime_uncertainty_seconds"]
        assert uncertainty <= 2
        assert started_at - crashed_at - 0.2 <= impact["downtime_seconds"] <= polled_at - crashed_at + uncertainty + 0.2
        assert impact["longest_seconds"] is None
