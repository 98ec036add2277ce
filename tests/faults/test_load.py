"""Load alone never counts as a failure of the disk: two busy loops and two agents on the same machine.

The long form takes five minutes.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from agent_stage import Stage

from bridge.agent.control_requests import why_unsaved
from bridge.agent.control_socket import ControlClient

SHORT_SECONDS, LONG_SECONDS = 5.0, 300.0
AGENTS = 2


def run(directory, env, seconds):
    """Let busy loops and agents run; return how many changes were made and the reasons for not being saved."""
    reasons, changes = [], 0
    with ExitStack() as stack:
        stages = []
        for number in range(AGENTS):
            home = directory / f"agent{number}"
            home.mkdir()
            stage = Stage(home, env)
            stack.callback(stage.close)
            stage.waiting.accepts = True
            stages.append(stage.start())
        for _ in range(os.cpu_count() or 1):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for stage in stages:
                stage.change()
                changes += 1
                # An agent that has too little CPU may answer late, but the disk is not behind then.
                reasons.append(ControlClient(stage.state, seconds=10.0).ask(why_unsaved))
        for stage in stages:
            stage.wait_until_settled()
            assert "cannot be saved" not in stage.log
    return changes, {reason for reason in reasons if reason is not None}


def test_load_alone_never_makes_the_disk_count_as_behind(tmp_path, agent_env):
    changes, reasons = run(tmp_path, agent_env, SHORT_SECONDS)
    assert changes
    assert reasons == set()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_load_for_five_minutes_never_makes_the_disk_count_as_behind(tmp_path, agent_env):
    changes, reasons = run(tmp_path, agent_env, LONG_SECONDS)
    print(f"\nbench: {LONG_SECONDS:g} s of load: {changes} changes, reasons {reasons}", end="")  # noqa: T201
    assert reasons == set()
