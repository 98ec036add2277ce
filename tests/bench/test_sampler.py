"""The CPU of the idle sampler relative to the CPU of a poll, on one thread: at most 2 %."""

from __future__ import annotations

import time
from statistics import median

import pytest

from bridge.imds.client import ImdsClient
from bridge.impact.sampler import Sampler, SystemClocks
from bridge.testing import Simulator

pytestmark = pytest.mark.bench

_POLLS, _ROUNDS = 300, 5
_MOST_OF_A_POLL = 0.02
#: The sampler reads /proc/stat at most every 5 s, so once in five polls.
_POLLS_PER_COUNT = 5


def _cpu_seconds(work, times):
    """Return the CPU seconds of one call of *work* on this thread."""
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times


def test_idle_sampler_costs_little_of_a_poll(figure):
    sampler, clocks = Sampler(), SystemClocks()

    def sample_a_poll():
        sampler.sample_wait(None)
        sampler.sample_wait(1.0)

    with Simulator(vms=["vm_0"], rate_limit=False) as azure:
        imds = ImdsClient(endpoint=azure.endpoint, api_version="2020-07-01", timeout_seconds=5, first_timeout_seconds=5)

        def poll():
            imds.scheduled_events()

        poll()
        rounds = [
            (
                _cpu_seconds(sample_a_poll, _POLLS)
                + _cpu_seconds(lambda: clocks.read(counts=True), _POLLS) / _POLLS_PER_COUNT,
                _cpu_seconds(poll, _POLLS),
            )
            for _ in range(_ROUNDS)
        ]
        imds.close()
    ratio = median(sampled / polled for sampled, polled in rounds)
    figure(f"idle sampler: {ratio:.3f} of the CPU of a poll ({median(s for s, _ in rounds) * 1e6:.0f} us)")
    assert ratio <= _MOST_OF_A_POLL
