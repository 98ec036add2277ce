"""The cost of a command and of a start, relative to bare programs, and the cost of 10,000 pending records."""

import os
import subprocess
import sys
import time
from statistics import median

import pytest

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_ROUNDS = 11
_STDOUT = '[[sinks]]\ntype = "stdout"\n'
_DEAD = '[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\n'
_EVENTS, _CHANGES = 500, 21  # three changes are 1,500 records
_MOST_MIB, _MOST_STATUS_SECONDS, _MOST_START_SECONDS = 30, 0.5, 1.0


@pytest.mark.parametrize(("command", "most"), [("--help", 2.5), ("status", 3.0)])
def test_cpu_time_of_a_command(*, command, most, serve, start_agent, scripts, env, figure, tmp_path):
    documents = serve()
    start_agent("agent", documents.endpoints[0], sinks=_STDOUT, poll_interval_seconds=1, stdout=subprocess.DEVNULL)
    documents.wait_for_polls(2, within_seconds=60)
    arguments = ["--help"] if command == "--help" else ["status", "--config", tmp_path / "agent" / "config.toml"]
    ours, bare = [], []
    for _ in range(_ROUNDS):
        ours.append(_cpu_seconds([scripts / "scheduled-events-bridge", *arguments], env))
        bare.append(_cpu_seconds([scripts / "python", "-c", "import click"], env))
    ratio = median(ours) / median(bare)
    figure(f"CPU of `{command}`: {median(ours) * 1000:.0f} ms, {ratio:.2f} times that of `import click`")
    assert ratio <= most


def test_time_from_start_to_first_poll(serve, start_agent, start_bare_loop, figure, is_short):
    ours, bare = [], []
    for number in range(5 if is_short else _ROUNDS):
        documents = serve(ports=2)
        bare.append(_first_poll(documents, 1, lambda url=documents.urls[1]: start_bare_loop(url, 60)))
        ours.append(
            _first_poll(
                documents,
                0,
                lambda name=f"agent-{number}", endpoint=documents.endpoints[0]: start_agent(
                    name, endpoint, sinks=_STDOUT, poll_interval_seconds=60, stdout=subprocess.DEVNULL
                ),
            )
        )
    ratio = median(ours) / median(bare)
    figure(f"start to first poll {median(ours):.2f} s, {ratio:.2f} times that of a bare loop")
    assert ratio <= 1.6


def test_memory_and_start_time_with_ten_thousand_pending_records(*, serve, start_agent, scripts, env, figure, tmp_path):
    idle = serve()
    bare = start_agent("idle", idle.endpoints[0], sinks=_DEAD, poll_interval_seconds=0.2, stdout=subprocess.DEVNULL)
    documents = serve(changes=_CHANGES, events=_EVENTS)
    endpoint = documents.endpoints[0]
    agent = start_agent("full", endpoint, sinks=_DEAD, poll_interval_seconds=0.2, stdout=subprocess.DEVNULL)
    documents.wait_for_polls(_CHANGES + 15, within_seconds=120)
    mib = (agent.memory_bytes("VmRSS") - bare.memory_bytes("VmRSS")) / 2**20
    status = [scripts / "scheduled-events-bridge", "status", "--config", tmp_path / "full" / "config.toml"]
    status_seconds = []
    for _ in range(_ROUNDS):
        began_at = time.monotonic()
        subprocess.run(status, env=env, stdout=subprocess.DEVNULL, check=False)
        status_seconds.append(time.monotonic() - began_at)
    agent.process.terminate()
    agent.process.wait(30)
    first = documents.polls()[0]
    again = [scripts / "scheduled-events-bridge", "run", "--config", tmp_path / "full" / "config.toml"]
    began_at = time.monotonic()
    with (tmp_path / "again.log").open("wb") as log, subprocess.Popen(again, env=env, stderr=log) as process:
        while documents.polls()[0] == first and time.monotonic() < began_at + 30:
            time.sleep(0.01)
        start_seconds = time.monotonic() - began_at
        process.terminate()
    figure(
        f"10,500 pending records: {mib:.1f} MiB more, `status` {median(status_seconds):.2f} s, "
        f"start to first poll {start_seconds:.2f} s"
    )
    assert mib <= _MOST_MIB
    assert median(status_seconds) < _MOST_STATUS_SECONDS
    assert start_seconds < _MOST_START_SECONDS


def _cpu_seconds(argv, env):
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


def _first_poll(documents, machine, start):
    """Return the seconds from *start* to the first poll of *machine*. Stop the process afterwards."""
    began_at = time.monotonic()
    measured = start()
    while not documents.polls()[machine]:
        assert time.monotonic() < began_at + 30
        time.sleep(0.005)
    seconds = time.monotonic() - began_at
    measured.process.terminate()
    measured.process.wait(30)
    return seconds
