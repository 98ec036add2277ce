"""An agent that has nothing to do does nothing: its threads wait until there is something, and are there at once."""

import os
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and the kernel tells of files")

_QUIET_SECONDS = 2.5


def wakeups(agent):
    """Return how often a thread of *agent* went to sleep so far."""
    threads = Path(f"/proc/{agent.process.pid}/task").iterdir()
    return sum(
        int(line.split()[1])
        for thread in threads
        for line in (thread / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def wait_until_quiet(agent):
    """Return once no thread has woken for 2.5 s; the tasks that are done now and then leave twice that."""
    give_up_at = time.monotonic() + 60
    count, since = wakeups(agent), time.monotonic()
    while time.monotonic() - since < _QUIET_SECONDS:
        assert time.monotonic() < give_up_at, "its threads never sleep that long"
        time.sleep(0.05)
        now = wakeups(agent)
        if now != count:
            count, since = now, time.monotonic()
    return count


@pytest.fixture
def idle(agent, imds):
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.configure(imds.url, '[[sinks]]\nname = "out"\ntype = "stdout"\n', poll_interval_seconds=300.0)
    agent.start()
    agent.wait_for(lambda: "The agent is running" in agent.log)
    return agent


def test_no_thread_wakes_between_the_polls_but_for_what_a_command_touches(idle):
    before = wait_until_quiet(idle)
    os.utime(idle.state / "nudge")
    idle.wait_for(lambda: wakeups(idle) > before, timeout_seconds=_QUIET_SECONDS)
    before = wait_until_quiet(idle)
    (idle.state / "approvals.disabled").touch()
    idle.wait_for(lambda: wakeups(idle) > before, timeout_seconds=_QUIET_SECONDS)
    before = wait_until_quiet(idle)
    idle.state.rename(idle.state.with_name("moved"))
    idle.wait_for(lambda: wakeups(idle) > before, timeout_seconds=_QUIET_SECONDS)
    idle.wait_for(lambda: "locked again" in idle.log)
    idle.wait_for((idle.state / "nudge").exists)
    before = wait_until_quiet(idle)
    os.utime(idle.state / "nudge")
    idle.wait_for(lambda: wakeups(idle) > before, timeout_seconds=_QUIET_SECONDS)
    assert idle.stop() == 0


def test_database_that_is_deleted_is_noticed_at_once(idle):
    wait_until_quiet(idle)
    (idle.state / "outbox.db").unlink()
    idle.wait_for(lambda: "the file was deleted" in idle.log)
    idle.wait_for((idle.state / "outbox.db").exists)
    assert idle.stop() == 0
