"""State that goes back in time: the same sequences are never given to other records of the same stream."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import outbox_kit
import pytest

from bridge.events.event import Document
from bridge.outbox import meta
from bridge.outbox.approvals import cli_decision, keep_decision
from bridge.outbox.reader import OutboxFile
from bridge.outbox.recovery import FileGuard

resource = pytest.importorskip("resource", reason="Windows keeps nothing beside the outbox")


@pytest.fixture
def runtime(tmp_path, kit):
    """Return the place that outlives the agent but not the boot."""
    kit.runtime = tmp_path / "runtime"
    kit.runtime.mkdir()
    return kit.runtime


def stream_of(outbox):
    return outbox.read(meta.load).result().stream_id


def stop(kit):
    kit.close()


def told(records):
    return {(record.stream_id, record.sequence): record.id for record in records}


def reboot(runtime):
    """Take away what a boot takes away."""
    for path in runtime.iterdir():
        path.unlink()


def restore(kit, copy):
    shutil.rmtree(kit.directory)
    shutil.copytree(copy, kit.directory)


@pytest.mark.usefixtures("runtime")
def test_a_state_directory_that_was_restored_begins_a_new_stream(kit, caplog):
    before = told(kit.fill(kit.open(), 3))
    stop(kit)
    copy = shutil.copytree(kit.directory, kit.directory.parent / "copy")
    lost = told(kit.fill(kit.open(), 2))
    stop(kit)
    for _ in range(2):
        restore(kit, copy)
        outbox = kit.open()
        again = told(kit.fill(outbox, 4, size=10))
        assert not again.keys() & (before | lost).keys()
        assert sorted(sequence for _, sequence in again) == [4, 5, 6, 7]
        assert kit.due(outbox) == list(range(1, 8))
        lost |= again
        stop(kit)
    assert "may not be the newest" in caplog.text


def test_many_streams_leave_one_file_beside_the_outbox_and_are_all_known(kit, runtime):
    kit.fill(kit.open(), 2)
    stop(kit)
    copy = shutil.copytree(kit.directory, kit.directory.parent / "copy")
    kit.fill(kit.open(), 1)
    stop(kit)
    streams = set()
    for _ in range(4):
        restore(kit, copy)
        outbox = kit.open()
        streams.add(stream_of(outbox))
        stop(kit)
        assert len(list(runtime.iterdir())) == 1
    assert len(streams) == 4
    outbox = kit.open()
    assert stream_of(outbox) in streams  # a restart as usual


@pytest.mark.usefixtures("runtime")
def test_a_database_that_was_restored_without_its_last_decisions_takes_none_from_before(kit):
    kit.fill(kit.open(), 1)
    stop(kit)
    copy = shutil.copytree(kit.directory, kit.directory.parent / "copy")
    outbox = kit.open()
    made_at = outbox.created_at
    decision = cli_decision(
        approver="anne", decision_id="D-1", event=kit.event("F-0"), event_digest="d", valid_seconds=3600.0
    )
    outbox.write(keep_decision, decision).result()
    stop(kit)
    restore(kit, copy)
    kit.wait(60)
    outbox = kit.open()
    assert outbox.created_at > made_at
    assert outbox.awaits_portal


def test_an_agent_that_died_while_it_worked_from_memory_gives_no_sequence_twice(kit, runtime):
    """What memory told the sinks is gone, and the next agent does not know how far that was."""
    kit.fill(kit.open(), 3)
    stop(kit)
    script = """
import os, resource, runpy, sys
from pathlib import Path
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
kit.runtime = Path(sys.argv[3])
outbox = kit.open()
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
records = kit.fill(outbox, 2)
assert outbox.in_memory
print(*(f"{record.stream_id}/{record.sequence}" for record in records), flush=True)
os.kill(os.getpid(), 9)
"""
    arguments = [sys.executable, "-c", script, outbox_kit.__file__, str(kit.directory), str(runtime)]
    died = subprocess.run(arguments, check=False, timeout=60, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    lost = set(died.stdout.split())
    assert len(lost) == 2
    after = {f"{record.stream_id}/{record.sequence}" for record in kit.fill(kit.open(), 4, size=10)}
    assert not after & lost


def test_an_agent_that_was_killed_goes_on_in_its_stream(kit, runtime):
    kit.fill(kit.open(), 3)
    stop(kit)
    script = """
import os, runpy, sys
from pathlib import Path
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
kit.runtime = Path(sys.argv[3])
print(kit.fill(kit.open(), 2)[-1].stream_id, flush=True)
os.kill(os.getpid(), 9)
"""
    arguments = [sys.executable, "-c", script, outbox_kit.__file__, str(kit.directory), str(runtime)]
    died = subprocess.run(arguments, check=False, timeout=60, capture_output=True, text=True)
    outbox = kit.open()
    assert stream_of(outbox) == died.stdout.strip()
    assert kit.commit(outbox, kit.event("new"), document=Document())[0].sequence == 6


def test_a_reboot_after_an_orderly_stop_goes_on_in_the_stream(kit, runtime):
    outbox = kit.open()
    kit.fill(outbox, 3)
    stream_id, awaited = stream_of(outbox), outbox.awaits_portal
    stop(kit)
    reboot(runtime)
    kit.wait(300)
    outbox = kit.open()
    assert (stream_of(outbox), outbox.awaits_portal) == (stream_id, awaited)


def test_a_copy_that_is_put_back_with_its_young_stop_note_begins_a_new_stream(kit, runtime, tmp_path):
    outbox = kit.open()
    before = told(kit.fill(outbox, 3))
    stop(kit)
    guard = FileGuard(kit.directory / "outbox.db")
    has_id = guard.file_id is not None
    guard.close()
    if not has_id:
        pytest.skip("The file system does not tell a file from a copy of it.")
    copy = shutil.copytree(kit.directory, tmp_path / "copy")
    before |= told(kit.fill(kit.open(), 2))
    stop(kit)
    restore(kit, copy)
    reboot(runtime)
    kit.wait(300)
    assert not told(kit.fill(kit.open(), 2, size=10)).keys() & before.keys()


@pytest.mark.parametrize("why", ["cut off", "long ago", "clock behind", "changed since"])
def test_a_start_after_a_boot_that_cannot_tell_begins_a_new_stream(kit, runtime, why):
    outbox = kit.open()
    kit.fill(outbox, 3)
    outbox.write(meta.note_portal_read, outbox.created_at).result()
    stream_id = stream_of(outbox)
    if why == "cut off":
        shutil.copytree(kit.directory, kit.directory.parent / "copy")
    stop(kit)
    if why == "cut off":
        restore(kit, kit.directory.parent / "copy")
    if why == "changed since":
        decision = cli_decision(
            approver="anne", decision_id="D-1", event=kit.event("F-0"), event_digest="d", valid_seconds=3600.0
        )
        OutboxFile(kit.directory).decide(decision)
    reboot(runtime)
    kit.wait({"long ago": 86_400, "clock behind": -3600}.get(why, 30))
    outbox = kit.open()
    assert stream_of(outbox) != stream_id
    assert outbox.awaits_portal  # a hold may be missing
    assert [record.sequence for record in kit.commit(outbox, kit.event("new"), document=Document())] == [4]
    assert kit.due(outbox) == [1, 2, 3, 4]


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root can give a file to another user")
def test_what_another_user_wrote_beside_the_outbox_is_not_believed(kit, runtime):
    outbox = kit.open()
    kit.fill(outbox, 3)
    stream_id = stream_of(outbox)
    stop(kit)
    (counter,) = runtime.iterdir()
    os.chown(counter, 65534, 65534)
    kit.wait(86_400)
    outbox = kit.open()
    assert stream_of(outbox) != stream_id
    assert kit.commit(outbox, kit.event("new"), document=Document())[0].sequence == 4


def test_memory_that_began_another_stream_brings_it_to_the_disk(kit, runtime):
    outbox = kit.open()
    kit.fill(outbox, 3)
    stream_id = stream_of(outbox)
    stop(kit)
    reboot(runtime)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        kit.wait(86_400)
        outbox = kit.open()
        in_memory = outbox.in_memory
        (record,) = kit.commit(outbox, kit.event("new"), document=Document())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert in_memory
    assert (record.stream_id != stream_id, record.sequence) == (True, 4)
    outbox.tend().result()
    assert (outbox.in_memory, stream_of(outbox)) == (False, record.stream_id)
    assert kit.due(outbox) == [1, 2, 3, 4]
    assert list(Path(kit.directory).glob("outbox.db.*")) == []
