"""The agent as a whole: start, turns, reload, and stop, with the lock, the watchdog, and the control socket."""

import os
import socket
import threading
import time

import msgspec
import pytest
from starved import no_threads

from bridge.agent import agent as agent_module
from bridge.agent.agent import Agent
from bridge.agent.control import ControlClient, NoAgent, RequestRefused
from bridge.agent.requests import Events, OutboxRetry, Status
from bridge.config.loader import read
from bridge.errors import StateDirectoryError
from bridge.events.event import VmIdentity
from bridge.outbox import saver
from bridge.outbox.database import Database
from bridge.outbox.lock import DirectoryLock, is_locked
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
        running.simulator = simulator
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
    assert set(agent._loop_watches()) == {"poll", "main", "delivery:stdout", "delivery:second"}


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


@pytest.mark.parametrize("has_file", [False, True])
def test_start_without_a_configuration_reports_the_effect_of_the_first_request(tmp_path, caplog, has_file):
    caplog.set_level("INFO")
    with Simulator(rate_limit=False) as simulator:
        settings = read({"imds": {"endpoint": simulator.endpoint}, "status": {"listen": ""}})
        file = tmp_path / "config.toml" if has_file else None
        agent = Agent(msgspec.structs.replace(settings, file=file), tmp_path / "state")
        agent.start()
        agent.stop()
    said = [record.getMessage() for record in caplog.records if "turns Scheduled Events on" in record.getMessage()]
    assert len(said) == (0 if has_file else 1)


def ask(agent, request):
    return ControlClient(agent.outbox.directory).ask(request)


def test_commands_see_and_change_the_running_agent(agent):
    assert wait_until(lambda: agent.parts.poller.good_at is not None)
    answer = ask(agent, Status())
    assert (answer.readiness.status, answer.readiness.vm) == ("ready", "simulated-vm")
    agent.simulator.world.add_event(EventSpec(event_type="Freeze"))
    assert wait_until(lambda: ask(agent, Events()).records)
    assert ask(agent, OutboxRetry(sink="second")).count == 0
    directory = agent.outbox.directory
    agent.stop()
    with pytest.raises(NoAgent):
        ControlClient(directory).ask(Status())


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no directory that is in use")
def test_state_directory_that_was_moved_aside_and_is_put_back_is_used_again(agent, tmp_path):
    state, aside, between = (tmp_path / name for name in ("state", "aside", "between"))
    state.rename(aside)
    agent.run_due()
    assert agent.outbox.wait_saved(10)
    assert ask(agent, Status()).file == "outbox-1.db"
    state.rename(between)
    aside.rename(state)
    agent.run_due()
    assert agent.outbox.wait_saved(10)
    with pytest.raises(StateDirectoryError, match="Another agent runs"):
        DirectoryLock(state)
    agent.parts.send_heartbeat()
    assert agent.outbox.wait_saved(10)
    assert not agent.outbox.is_behind


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no directory that is in use")
def test_agent_stops_at_once_when_another_agent_uses_the_new_directory(agent, tmp_path):
    (tmp_path / "state").rename(tmp_path / "aside")
    (tmp_path / "state").mkdir()
    other = DirectoryLock(tmp_path / "state")
    with pytest.raises(StateDirectoryError, match="Another agent runs"):
        agent.run_due()
    began_at = time.monotonic()
    agent.stop()
    assert time.monotonic() - began_at < 5
    assert list((tmp_path / "state").iterdir()) == []
    other.release()


@pytest.fixture
def slow_load(monkeypatch):
    """Let the load of the outbox wait until the event is set."""
    loading, read_newest = threading.Event(), saver.read_newest
    monkeypatch.setattr(saver, "read_newest", lambda directory: loading.wait(60) and read_newest(directory))
    monkeypatch.setattr(agent_module, "_LOAD_REPORT_SECONDS", 0.2)
    yield loading
    loading.set()


def test_slow_load_is_reported_and_delays_the_poll(tmp_path, manager, slow_load, caplog):
    with Simulator(rate_limit=False) as simulator:
        settings = read({"imds": {"endpoint": simulator.endpoint}, "status": {"listen": ""}})
        agent = Agent(settings, tmp_path / "state")
        starting = threading.Thread(target=agent.start)
        starting.start()
        assert wait_until(lambda: "still loading" in caplog.text)
        assert heard(manager)[0].startswith(b"EXTEND_TIMEOUT_USEC=15000000")
        with pytest.raises(RequestRefused, match="still loading"):
            ask(agent, Status())
        assert agent.parts.poller is None
        slow_load.set()
        starting.join(30)
        assert b"READY=1" in heard(manager)
        assert ask(agent, Status()).readiness is not None
        agent.stop()


def test_stop_ends_the_load(tmp_path, slow_load):
    stop = threading.Event()
    agent = Agent(read({"status": {"listen": ""}, "stop_grace_seconds": 0.5}), tmp_path / "state")
    starting = threading.Thread(target=agent.start, args=(stop.is_set,))
    starting.start()
    stop.set()
    starting.join(5)
    assert not starting.is_alive()
    began_at = time.monotonic()
    agent.stop()
    assert time.monotonic() - began_at < 1.5
    assert not slow_load.is_set()


def test_stop_ends_in_time_while_the_disk_hangs_and_keeps_the_lock(agent, monkeypatch, caplog):
    released = threading.Event()
    save = Database.save
    monkeypatch.setattr(Database, "save", lambda *args, **options: released.wait(60) and save(*args, **options))
    agent.parts.send_heartbeat()
    began_at = time.monotonic()
    agent.stop()
    try:
        assert time.monotonic() - began_at < 2.5
        assert is_locked(agent.outbox.directory)
        assert "could not be saved" in caplog.text
    finally:
        released.set()
