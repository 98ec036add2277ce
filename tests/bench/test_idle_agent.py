"""The CPU of idle agents relative to bare loops with the same interval, and their writes to disk.

Several agents and bare loops run at the same time, so that other work on the machine affects both.
"""

import subprocess
import sys
import threading
from statistics import median

import pytest

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_INTERVAL_SECONDS = 1.0
_MOST_OF_BARE = 0.85
_PROCESSES = 4
_WINDOW_SECONDS = 15.0
_STDOUT = '[[sinks]]\ntype = "stdout"'


@pytest.fixture
def start_both(serve, start_agent, start_bare_loop):
    """Return a function that starts the agents and the bare loops, each with a separate machine."""

    def start():
        documents = serve(ports=2 * _PROCESSES)
        agents = [
            start_agent(
                f"agent-{number}",
                endpoint,
                sinks=_STDOUT,
                poll_interval_seconds=_INTERVAL_SECONDS,
                stdout=subprocess.DEVNULL,
            )
            for number, endpoint in enumerate(documents.endpoints[:_PROCESSES])
        ]
        bare_loops = [start_bare_loop(url, _INTERVAL_SECONDS) for url in documents.urls[_PROCESSES:]]
        documents.wait_for_polls(10, within_seconds=120)
        return documents, agents, bare_loops

    return start


def test_idle_agent_uses_less_cpu_than_bare_loops(start_both, files, figure, chart, is_short):
    documents, agents, bare_loops = start_both()
    before, calls = files(), [agent.write_calls() for agent in agents]
    # Both forms take more than a minute, to include the agent's work once per minute.
    windows = 5 if is_short else 12
    ours, bare = _micros_a_poll(documents, agents, bare_loops, windows)
    ratio = median(ours) / median(bare)
    figure(
        f"idle agent CPU ratio {ratio:.2f} (installed, a poll each {_INTERVAL_SECONDS:g} s, {_PROCESSES} side by "
        f"side, medians of {windows} windows of {_WINDOW_SECONDS:g} s; "
        f"ours {median(ours):.0f} us a poll, bare {median(bare):.0f} us)"
    )
    chart("cpu", "agent", value=ratio)
    assert files() == before
    assert [agent.write_calls() for agent in agents] == calls
    assert ratio <= _MOST_OF_BARE


def _micros_a_poll(documents, agents, bare_loops, windows):
    """Return the CPU microseconds per poll in each window for the agents and for the bare loops."""
    never = threading.Event()
    ours, bare = [], []
    before = _readings(documents, agents, bare_loops)
    for _ in range(windows):
        never.wait(_WINDOW_SECONDS)
        after = _readings(documents, agents, bare_loops)
        (our_polls, our_seconds), (bare_polls, bare_seconds) = (
            (polls - polls_before, seconds - seconds_before)
            for (polls, seconds), (polls_before, seconds_before) in zip(after, before, strict=True)
        )
        ours.append(our_seconds / our_polls * 1e6)
        bare.append(bare_seconds / bare_polls * 1e6)
        before = after
    return ours, bare


def _readings(documents, agents, bare_loops):
    """Return (polls, CPU seconds) of all agents and of all bare loops."""
    polls = documents.polls()
    return (
        (sum(polls[:_PROCESSES]), sum(agent.cpu_seconds() for agent in agents)),
        (sum(polls[_PROCESSES:]), sum(loop.cpu_seconds() for loop in bare_loops)),
    )
