"""The CPU time of an event with three transitions, from the first document to the saved results of all sinks.

Two agents with the same sinks poll the same number of times. One of them sees events, and the difference is the cost.
"""

import subprocess
import sys
import time

import pytest

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU clock of a process"),
]

_POLL_SECONDS = 0.2
_POLLS_PER_CHANGE = 6  # an ending needs five responses
_WARM_UP_POLLS = 5 + 3 * _POLLS_PER_CHANGE
_MOST_MS = {1: 8.0, 4: 14.0}


@pytest.mark.parametrize("sinks", [1, 4])
def test_cpu_time_of_an_event_with_three_transitions(*, sinks, serve, start_agent, figure, is_short):
    events = 15 if is_short else 60
    busy = serve(changes=3 * (events + 1), polls_a_change=_POLLS_PER_CHANGE)
    idle = serve()
    agents = [
        start_agent(
            f"agent-{number}",
            documents.endpoints[0],
            sinks="".join(
                f'[[sinks]]\ntype = "webhook"\nname = "hook-{sink}"\nurl = "{busy.endpoints[0]}/{sink}"\n'
                for sink in range(sinks)
            ),
            poll_interval_seconds=_POLL_SECONDS,
            stdout=subprocess.DEVNULL,
        )
        for number, documents in enumerate((busy, idle))
    ]
    before = _readings(agents, (busy, idle), _WARM_UP_POLLS)
    after = _readings(agents, (busy, idle), _WARM_UP_POLLS + 3 * events * _POLLS_PER_CHANGE)
    (busy_seconds, busy_polls), (idle_seconds, idle_polls) = (
        tuple(now - then for now, then in zip(late, early, strict=True))
        for late, early in zip(after, before, strict=True)
    )
    milliseconds = (busy_seconds - idle_seconds / idle_polls * busy_polls) / events * 1000
    figure(f"CPU of an event with three transitions, {sinks} sinks: {milliseconds:.1f} ms ({events} events)")
    assert milliseconds < _MOST_MS[sinks]


def _readings(agents, servers, polls):
    """Return (CPU seconds, polls) of each agent after *polls* polls and the work that they caused."""
    for documents in servers:
        documents.wait_for_polls(polls, within_seconds=600)
    time.sleep(_POLL_SECONDS / 2)
    return [(agent.cpu_seconds(), documents.polls()[0]) for agent, documents in zip(agents, servers, strict=True)]
