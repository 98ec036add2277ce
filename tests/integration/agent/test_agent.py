"""The complete agent: start, main loop, reload, and stop, with the lock, the watchdog, and the control socket."""

import os
import socket
import time

import msgspec
import pytest
from outbox_kit import append
from starved import no_threads
from waiting import until

from bridge.agent.agent import Agent
from bridge.agent.control_requests import read_events, read_status, retry_records
from bridge.agent.control_socket import ControlClient, NoAgent
from bridge.config.loader import read
from bridge.errors import StateDirectoryError
from bridge.events.event import VmIdentity
from bridge.outbox.lock import DirectoryLock
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
    """Return the messages to the service manager for a tick one second after the previous tick."""
    heard(manager)
    time.sleep(1.01)
    agent.feed_watchdog()
    return heard(manager)


def test_worker_without_a_thread_starts_later_and_delays_no_stop(agent):
    [sink] = read({"sinks": [{"type": "stdout", "name": "third"}]}).sinks
    with no_threads(), pytest.raises(RuntimeError):
        agent.pool.start_missing([sink])
    assert "delivery:third" not in agent._loop_watches()
    agent.pool.start_missing([sink])
    assert "delivery:third" in agent._loop_watches()


def test_failed_reload_without_a_thread_keeps_the_state_and_can_be_repeated(agent):
    name = agent.vm_name()
    changed = msgspec.structs.replace(agent._settings, vm=VmIdentity(tags={"team": "a"}))
    with no_threads(), pytest.raises(RuntimeError):
        agent.reload(changed)
    assert name is not None
    assert agent.vm_name() == name
    agent.reload(changed)
    assert agent.identity.vm.tags == {"team": "a"}
    assert agent.health.healthz().status == 200


def test_watchdog_is_fed_only_while_the_poll_runs(agent, manager):
    assert heard(manager)[0] == b"READY=1"
    assert ticked(agent, manager) == [b"WATCHDOG=1"]
    agent.stop_polling.set()  # so that the loop makes no new promise
    agent.poll_thread.join(10)
    agent.poller.loop_watch.expect_within(-1e6)
    assert ticked(agent, manager) == []
    assert agent.health.healthz().status == 503
    agent.poller.loop_watch.idle()
    assert ticked(agent, manager) == [b"WATCHDOG=1"]
    assert agent.health.healthz().status == 200


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


def test_restart_after_a_good_response_uses_the_short_imds_deadline(agent):
    until(lambda: agent.poller.good_at is not None)
    agent.stop()
    agent.simulator.close()
    restarted = Agent(agent._settings, agent.outbox.directory)
    restarted.start()
    restarted.stop()
    assert restarted.imds.deadline_seconds == 5


def ask(agent, request, **arguments):
    return ControlClient(agent.outbox.directory).ask(request, **arguments)


def test_commands_read_and_change_the_running_agent(agent):
    until(lambda: agent.poller.good_at is not None)
    answer = ask(agent, read_status)
    assert (answer.readiness.status, answer.readiness.vm) == ("ready", "simulated-vm")
    agent.simulator.world.add_event(EventSpec(event_type="Freeze"))
    until(lambda: ask(agent, read_events).records)
    assert ask(agent, retry_records, sink="second") == 0
    directory = agent.outbox.directory
    agent.stop()
    with pytest.raises(NoAgent):
        ControlClient(directory).ask(read_status)


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no directory that is in use")
def test_state_directory_that_is_moved_away_and_restored_is_used_again(agent, tmp_path):
    state, aside, between = (tmp_path / name for name in ("state", "aside", "between"))
    state.rename(aside)
    agent.run_due()
    assert agent.outbox.wait_saved(10)
    assert agent.outbox.saver.file.name == "outbox-1.db"
    assert ask(agent, read_status).older_files == ()
    state.rename(between)
    aside.rename(state)
    agent.run_due()
    assert agent.outbox.wait_saved(10)
    with pytest.raises(StateDirectoryError, match="Another agent runs"):
        DirectoryLock(state)
    append(agent.outbox, "heartbeat")
    assert agent.outbox.wait_saved(10)
    assert not agent.outbox.is_behind


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no directory that is in use")
def test_agent_stops_immediately_if_another_agent_uses_the_new_directory(agent, tmp_path):
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


def test_periodic_task_failure_with_varying_message_is_logged_once(agent, caplog):
    attempts = []

    def fail():
        attempts.append(1)
        raise OSError(f"attempt {len(attempts)}")

    agent._run_every(0, "test", fail)
    agent._run_every(0, "test", fail)
    assert len(attempts) == 2
    assert sum("A periodic task failed: test." in entry.getMessage() for entry in caplog.records) == 1
