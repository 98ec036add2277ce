"""A real agent that starts on a failing disk polls, sends, and recovers all readable rows."""

import time
from contextlib import contextmanager

import preload
import pytest
from agent_stage import NOTHING, Stage, judge
from loop_disk import loop_disk
from small_disk import small_disk

MOST_START_SECONDS = 5.0


@contextmanager
def killed(directory, env, **options):
    """Yield the stage of a killed agent with records that are only in the outbox."""
    stage = Stage(directory, env, **options)
    try:
        stage.start()
        for _ in range(6):
            stage.change()
        stage.wait_until_settled()
        stage.kill()
        yield stage
    finally:
        stage.close()


def start_and_compare(stage, *, is_behind, **env):
    """Start the agent. It sends stored and new records, and approves events only if it can save them."""
    stage.waiting.accepts = True
    began, posted = time.monotonic(), stage.azure.approved()
    stage.start(**env)
    stage.azure.announce("E-new")
    stage.wait(lambda: ("E-new", "scheduled") in stage.waiting.transitions(), MOST_START_SECONDS)
    if is_behind:
        stage.wait_for_polls(5)
        assert stage.azure.approved() == posted
        assert not stage.is_saved()
        expected = stage.expected() - {("E-new", "approved")}
        stage.wait(lambda: expected <= stage.waiting.transitions())
    else:
        stage.wait_until_settled()
        stage.wait_for_records(stage.waiting)
        expected = stage.expected()
    assert stage.azure.longest_gap(began) < MOST_START_SECONDS
    for receiver in (stage.healthy, stage.waiting):
        assert judge(expected, receiver.records) == NOTHING


def test_agent_starts_on_a_read_only_file_system(tmp_path, agent_env):
    with loop_disk(tmp_path / "disk") as disk, killed(tmp_path, agent_env, state=disk.path / "state") as stage:
        disk.remount("ro")
        start_and_compare(stage, is_behind=True)
        disk.remount("rw")
        stage.wait_until_settled(60)


def test_agent_starts_on_a_full_disk(tmp_path, agent_env):
    with small_disk(tmp_path / "disk", 8) as disk, killed(tmp_path, agent_env, state=disk.path / "state") as stage:
        disk.fill()
        start_and_compare(stage, is_behind=True)
        disk.free()
        stage.wait_until_settled(60)


def test_slow_disk_at_the_start_does_not_delay_polls(tmp_path, agent_env, tmp_path_factory):
    library = preload.built(tmp_path_factory, preload.FAULTS)
    env = {**agent_env, "FAULTS": str(tmp_path / "faults"), "FAULT_ROOT": str(tmp_path / "state")}
    (tmp_path / "faults").mkdir()
    with killed(tmp_path, env, preload=library) as stage:
        (tmp_path / "faults" / "slow").touch()
        start_and_compare(stage, is_behind=True)
        (tmp_path / "faults" / "slow").unlink()
        stage.wait_until_settled(60)


@pytest.fixture
def failing(tmp_path, agent_env, tmp_path_factory):
    """Yield the stage of a killed agent, and a function that returns the file that makes a system call fail."""
    library = preload.built(tmp_path_factory, preload.FAULTS)
    env = {**agent_env, "FAULTS": str(tmp_path / "faults"), "FAULT_ROOT": str(tmp_path / "state" / "outbox")}
    (tmp_path / "faults").mkdir()
    with killed(tmp_path, env, preload=library) as stage:
        yield stage, (tmp_path / "faults").joinpath


@pytest.mark.parametrize("call", ["open", "stat"])
def test_outbox_is_loaded_once_a_disk_that_failed_at_the_start_recovers(failing, call):
    stage, fault = failing
    fault(call).touch()
    stage.process = stage.new_agent()
    stage.wait(lambda: "because the outbox is still loading." in stage.log)
    fault(call).unlink()
    stage.waiting.accepts = True
    stage.wait_for_records(stage.waiting)
    assert judge(stage.expected(), stage.waiting.records) == NOTHING


@pytest.mark.long
@pytest.mark.parametrize("call", ["open", "stat"])
def test_agent_starts_without_the_outbox_after_thirty_seconds_of_disk_errors(failing, call):
    stage, fault = failing
    fault(call).touch()
    began, polls = time.monotonic(), len(stage.azure.polled_at)
    stage.process = stage.new_agent()
    stage.wait(lambda: len(stage.azure.polled_at) > polls + 1, 45)
    assert 30 < time.monotonic() - began < 40
    stage.azure.announce("E-new")
    stage.wait(lambda: ("E-new", "scheduled") in stage.healthy.transitions())
    fault(call).unlink()
    stage.wait(stage.is_saved, 60)
