"""The agent put together: which loops are watched, and that systemd's watchdog is fed only while the poll turns."""

import os
import signal
import socket
import sys
import threading
import time
from itertools import count

import msgspec
import pytest
from least_time import least
from small_disk import small_disk
from starved import no_threads

from bridge.agent.agent import Agent
from bridge.agent.parts import TEND_SECONDS
from bridge.config.loader import read
from bridge.errors import StateDirectoryError
from bridge.events.event import VmIdentity
from bridge.outbox.locks import DirectoryLock
from bridge.outbox.reader import OutboxFile
from bridge.testing import EventSpec, Simulator


@pytest.fixture
def manager(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "3000")  # fed each millisecond, at most each second
        yield listening


@pytest.fixture
def agent(tmp_path, manager):  # noqa: ARG001  # there before the agent looks
    with Simulator(rate_limit=False) as simulator:
        settings = read(
            {
                "imds": {"endpoint": simulator.endpoint, "poll_interval_seconds": 0.2},
                "status": {"listen": "127.0.0.1:0"},
                "stop_grace_seconds": 1.0,
                "sinks": [{"type": "stdout"}, {"type": "stdout", "name": "second"}],
            }
        )
        running = Agent(settings, tmp_path / "state")
        running.start()
        yield running
        running.stop()


def heard(manager):
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096).split(b"\n")[0])
        except BlockingIOError:
            return messages


def ticked(agent, manager):
    """Return what the manager hears of a tick that is a second after the one before."""
    heard(manager)
    time.sleep(1.01)
    agent.feed_watchdog()
    return heard(manager)


def test_worker_that_gets_no_thread_is_started_later_and_delays_no_stop(agent):
    [sink] = read({"sinks": [{"type": "stdout", "name": "third"}]}).sinks
    with no_threads(), pytest.raises(RuntimeError):
        agent.parts.pool.start_missing([sink])
    assert "delivery:third" not in agent._loop_watches()
    agent.parts.pool.start_missing([sink])
    assert "delivery:third" in agent._loop_watches()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of changes in a directory")
def test_turns_of_a_calm_agent_are_seldom_until_its_disk_refuses(tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk, Simulator(rate_limit=False) as simulator:
        imds = {"endpoint": simulator.endpoint, "poll_interval_seconds": 0.2}
        settings = read({"imds": imds, "status": {"listen": ""}, "sinks": [{"type": "stdout"}]})
        agent = Agent(settings, disk.path / "state")
        before = signal.signal(signal.SIGIO, lambda *_: agent.turn.set())

        def seconds_to_next():
            agent.run_due()
            return agent.parts.periodic.seconds_to_next()

        try:
            agent.start()
            agent.watch_directory()
            assert wait_until(lambda: seconds_to_next() > TEND_SECONDS + 1)
            disk.fill()
            agent.turn.clear()
            simulator.world.add_event(EventSpec(event_type="Freeze"))
            assert agent.turn.wait(30)
            assert wait_until(lambda: agent.outbox.in_memory)
            assert seconds_to_next() < TEND_SECONDS + 1
        finally:
            agent.stop()
            signal.signal(signal.SIGIO, before)


def test_reload_without_a_thread_leaves_what_was_there_and_can_be_repeated(agent):
    name = agent.vm_name()
    changed = msgspec.structs.replace(agent._settings, vm=VmIdentity(tags={"team": "a"}))
    with no_threads(), pytest.raises(RuntimeError):
        agent.reload(changed)
    assert name is not None
    assert agent.vm_name() == name
    agent.reload(changed)
    assert agent.parts.identity.vm.tags == {"team": "a"}
    assert agent.health.healthz().status == 200


def test_every_loop_is_watched(agent):
    assert set(agent._loop_watches()) == {"poll", "main", "outbox", "delivery:stdout", "delivery:second"}


def test_watchdog_is_fed_only_while_the_poll_turns(agent, manager):
    assert heard(manager)[0] == b"READY=1"
    assert ticked(agent, manager) == [b"WATCHDOG=1"]
    agent.parts.stop_polling.set()  # so that the loop makes no new promise
    agent.parts.poll_thread.join(10)
    agent.parts.poller.loop_watch.expect_within(-1e6)
    assert ticked(agent, manager) == []
    assert agent.health.healthz().status == 503
    agent.parts.poller.loop_watch.idle()
    assert ticked(agent, manager) == [b"WATCHDOG=1"]
    assert agent.health.healthz().status == 200


@pytest.fixture
def turning(tmp_path):
    """Return an agent that another thread turns, as `run` does, and the times of its turns."""
    with Simulator(rate_limit=False) as simulator:
        imds = {"endpoint": simulator.endpoint, "poll_interval_seconds": 0.2}
        agent = Agent(read({"imds": imds, "status": {"listen": ""}, "sinks": [{"type": "stdout"}]}), tmp_path / "state")
        turns, stop = [], threading.Event()
        agent.start()
        agent.run_due()

        def turn():
            while agent.wait_for_turn(stop):
                turns.append(time.monotonic())
                agent.run_due()

        thread = threading.Thread(target=turn)
        thread.start()
        yield agent, turns
        stop.set()
        agent.turn.set()
        thread.join(10)
        agent.stop()


def wait_until(condition):
    give_up_at = time.monotonic() + 30
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return condition()


def test_what_a_command_has_touched_gets_a_turn_within_a_second(turning, tmp_path):
    """Without that there is none for five seconds, or fifteen."""
    _, turns = turning
    touches = count(1)

    def seconds_to_turn():
        before, touched_at = len(turns), time.monotonic()
        touch = next(touches)
        os.utime(tmp_path / "state" / "nudge", ns=(touch, touch))
        assert wait_until(lambda: len(turns) > before)
        return turns[before] - touched_at

    assert least(seconds_to_turn, below=3) < 3


def test_poll_goes_on_while_not_even_a_look_at_the_state_directory_comes_back(turning, tmp_path, monkeypatch):
    """As on a file server that is gone."""
    agent, _ = turning
    state, looked, is_back = str(tmp_path / "state"), threading.Event(), threading.Event()

    def hanging(look):
        def look_in_vain(path, *args, **options):
            if str(path).startswith(state):
                looked.set()
                is_back.wait(30)
            return look(path, *args, **options)

        return look_in_vain

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, hanging(getattr(os, name)))
    try:
        assert looked.wait(10)
        for _ in range(3):
            before = agent.parts.poller.good_at
            assert wait_until(lambda before=before: agent.parts.poller.good_at != before)
    finally:
        is_back.set()


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no directory that is in use")
def test_state_directory_that_was_moved_aside_and_is_put_back_is_used_again(agent, tmp_path):
    state, aside, between = (tmp_path / name for name in ("state", "aside", "between"))
    state.rename(aside)
    agent.run_due()
    agent.outbox.tend().result(10)
    state.rename(between)
    aside.rename(state)
    agent.run_due()
    agent.outbox.tend().result(10)
    for directory in (state, between):
        with pytest.raises(StateDirectoryError, match="Another agent runs"):
            DirectoryLock(directory)
    agent.parts.send_heartbeat()
    assert wait_until(lambda: OutboxFile(state).records())


@pytest.mark.parametrize("has_file", [False, True])
def test_start_without_a_configuration_says_what_the_first_request_changes(tmp_path, caplog, has_file):
    caplog.set_level("INFO")
    with Simulator(rate_limit=False) as simulator:
        settings = read({"imds": {"endpoint": simulator.endpoint}, "status": {"listen": ""}})
        file = tmp_path / "config.toml" if has_file else None
        agent = Agent(msgspec.structs.replace(settings, file=file), tmp_path / "state")
        agent.start()
        agent.stop()
    said = [record.getMessage() for record in caplog.records if "turns Scheduled Events on" in record.getMessage()]
    assert len(said) == (0 if has_file else 1)


def test_stop_to_which_the_outbox_gives_no_answer_does_not_say_that_nothing_is_pending(agent, caplog):
    caplog.set_level("INFO")
    go_on = threading.Event()
    agent.outbox.read(lambda _connection: go_on.wait(30))
    try:
        agent.stop()
    finally:
        go_on.set()
    [stopped] = [record for record in caplog.records if record.getMessage() == "The agent stopped."]
    assert stopped.pending is None
