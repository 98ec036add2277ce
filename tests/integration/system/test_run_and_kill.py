"""Programs that misbehave: the caller always returns in time, and no process or descriptor remains."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from least_time import least_seconds
from waiting import until

from bridge.system.run_and_kill import Ending, Finished, Runner, find_program

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")


def sh(script, *, deadline_seconds=30.0, **options):
    return Runner().run(["/bin/sh", "-c", script], deadline_seconds=deadline_seconds, **options)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {b"Z", b"X"}


def wait_for_pids(path, count):
    def pids():
        return path.read_text().split() if path.exists() else []

    until(lambda: len(pids()) == count)
    return [int(pid) for pid in pids()]


def wait_until_dead(pids):
    until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.fixture
def pids(tmp_path):
    """A file to which a script writes the pids that it starts. Teardown kills the remaining processes."""
    path = tmp_path / "pids"
    yield path
    for pid in path.read_text().split() if path.exists() else []:
        if is_alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def test_result_has_the_exit_code_and_the_end_of_standard_error():
    finished = sh("seq 1 5000 >&2; printf 'the \\033[31mlast\\0 line\\n' >&2; exit 3")
    assert (finished.ending, finished.exit_code) == (Ending.ITSELF, 3)
    assert finished.error_output.endswith("4999 5000 the [31mlast line")
    assert len(finished.error_output) == 256


def test_standard_input_arrives_completely(tmp_path):
    sent = b'{"id": 1}\n' * 100_000
    assert sh(f"cat >{tmp_path}/got", stdin=sent).exit_code == 0
    assert (tmp_path / "got").read_bytes() == sent


def test_program_that_ignores_standard_input_does_not_fail():
    assert sh("exit 0", stdin=b"x" * 5_000_000).exit_code == 0
    assert sh("sleep 0.3; exit 4", stdin=b"x" * 5_000_000).exit_code == 4


def test_endless_output_is_limited_in_time_and_memory():
    def print_without_end(where):
        finished = sh(f"yes {'x' * 1000} {where}", deadline_seconds=0.5)
        assert finished.ending is Ending.DEADLINE
        assert len(finished.error_output) <= 256

    in_time = 0.5 * 1.1 + 0.2
    for where in ("", ">&2"):
        assert least_seconds(lambda where=where: print_without_end(where), below=in_time) < in_time


@needs_proc
def test_whole_process_group_ends_at_the_deadline(pids):
    script = f"""
trap '' TERM
(trap '' TERM; sleep 300) & echo $! >>{pids}
sleep 300 & echo $! >>{pids}
echo $$ >>{pids}
while :; do wait; done
"""

    def run_to_the_deadline():
        finished = sh(script, deadline_seconds=2.0)
        assert finished.ending is Ending.DEADLINE
        assert finished.exit_code in {-signal.SIGKILL, None}, "None: on a busy machine it is gone a moment later"

    in_time = 2.0 * 1.1 + 0.2
    assert least_seconds(run_to_the_deadline, below=in_time) < in_time
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) >= 3
    wait_until_dead(started)


@needs_proc
def test_background_child_with_open_pipes_does_not_block_the_caller(pids):
    before = time.monotonic()
    finished = sh(f"sleep 300 & echo $! >{pids}; echo started >&2")
    assert time.monotonic() - before < 15, "half of its deadline"
    assert finished == Finished(ending=Ending.ITSELF, exit_code=0, error_output="started")
    assert is_alive(*wait_for_pids(pids, 1))


@needs_proc
def test_close_from_another_thread_kills_programs_and_prevents_new_ones(pids):
    runner = Runner()
    ended = []
    script = f"trap '' TERM; sleep 300 & echo $! >>{pids}; echo $$ >>{pids}; while :; do wait; done"

    def work():
        ended.append(runner.run(["/bin/sh", "-c", script], deadline_seconds=120))

    thread = threading.Thread(target=work)
    thread.start()
    started = wait_for_pids(pids, 2)
    before = time.monotonic()
    runner.close()
    thread.join(30)
    assert time.monotonic() - before < 15, "its deadline is 120 s away, its own end 300 s"
    assert [finished.ending for finished in ended] == [Ending.CLOSED]
    wait_until_dead(started)
    runner.close()
    assert runner.run(["/bin/sh", "-c", f"echo 1 >>{pids}"], deadline_seconds=5).ending is Ending.CLOSED
    assert len(pids.read_text().split()) == 2


@needs_proc
def test_exit_of_the_agent_kills_its_program(pids, agent_env):
    code = f"""
import threading, time
from pathlib import Path
from bridge.system.run_and_kill import Runner
script = "trap '' TERM; echo $$ >{pids}; while :; do sleep 1; done"
threading.Thread(target=lambda: Runner().run(["/bin/sh", "-c", script], deadline_seconds=300), daemon=True).start()
while not (Path({str(pids)!r}).exists() and Path({str(pids)!r}).read_text()):
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", code], env=agent_env, check=True, timeout=60)
    wait_until_dead(wait_for_pids(pids, 1))


@needs_proc
def test_fifty_runs_leak_no_zombie_descriptor_or_thread(agent_env):
    # In a separate process, because garbage of earlier tests could be collected during the runs.
    code = """
import os, sys, threading, time
from pathlib import Path
from bridge.system.run_and_kill import Runner

def sh(script, deadline_seconds=30.0, stdin=b""):
    Runner().run(["/bin/sh", "-c", script], deadline_seconds=deadline_seconds, stdin=stdin)

def left():
    return sorted(os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()), threading.enumerate()

sh("exit 0")
before = left()
scripts = ["exit 0", "exit 1", "cat >/dev/null", "kill -9 $$", "sleep 0.3 & exit 0"]
for number in range(50):
    sh(scripts[number % len(scripts)], stdin=b"x" * 200_000)
for _ in range(3):
    sh("sleep 300", deadline_seconds=0.1)
try:
    Runner().run(["/nowhere/at-all"], deadline_seconds=1)
except FileNotFoundError:
    pass
# A killed process can remain for a moment, and a thread waits for its end.
children, give_up_at = Path(f"/proc/self/task/{os.getpid()}/children"), time.monotonic() + 30
while (left() != before or children.read_text()) and time.monotonic() < give_up_at:
    time.sleep(0.01)
if left() != before:
    sys.exit(f"{before} became {left()}")
if children.read_text():
    sys.exit(f"children are left: {children.read_text()}")
"""
    subprocess.run([sys.executable, "-c", code], env=agent_env, check=True, timeout=120)


def test_environment_variables_are_inherited_overridden_and_removed(monkeypatch):
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("HIDDEN", "hidden")
    finished = sh(
        'echo "$KEPT,${HIDDEN-none},$ADDED" >&2', environment={"ADDED": "Müller \udc80"}, without=["HIDDEN", "ABSENT"]
    )
    assert finished.error_output == "kept,none,Müller ?"


def test_lost_exit_code_is_an_error(agent_env):
    code = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from bridge.system.run_and_kill import Runner
try:
    print(Runner().run(["/bin/false"], deadline_seconds=5))
except OSError as error:
    print("refused:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=agent_env, check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.startswith("refused: [Errno 10] SIGCHLD is ignored")


def test_find_program_uses_the_path_that_the_runner_uses(tmp_path):
    program = tmp_path / "my-drain"
    program.write_text("#!/bin/sh\nexit 7\n")
    place = {"PATH": str(tmp_path)}
    assert find_program("my-drain", place) is None
    program.chmod(0o755)
    assert find_program("my-drain", place) == str(program)
    assert find_program("my-drain") is None
    assert Runner().run(["my-drain"], environment=place, deadline_seconds=30).exit_code == 7
