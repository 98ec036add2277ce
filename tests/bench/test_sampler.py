"""The CPU of the idle sampler, compared with the CPU of the request of a poll on the same thread.

Both run after a wait, as in the agent, because the CPU caches contain little of a program after a wait.
The whole agent uses about three times the CPU of the request, so 6 % of the request are 2 % of a poll.
"""

import threading
import time
from statistics import median

import pytest

from bridge.config.settings import ImdsSettings
from bridge.imds.client import ImdsClient
from bridge.impact.sampler import Sampler, SystemClocks
from bridge.testing import Simulator

pytestmark = pytest.mark.bench

_POLLS, _WAIT_SECONDS = 100, 0.1
_MOST_OF_THE_REQUEST = 0.06
#: The sampler reads /proc/stat every 5 s, so once in five polls.
_POLLS_PER_COUNT = 5


def _cpu_seconds(work):
    began = time.thread_time()
    work()
    return time.thread_time() - began


def test_idle_sampler_uses_a_small_share_of_the_poll_cpu(figure):
    sampler, clocks, never = Sampler(), SystemClocks(), threading.Event()
    with Simulator(vms=["vm_0"], rate_limit=False) as azure:
        imds = ImdsClient(
            ImdsSettings(endpoint=azure.endpoint, api_version="2020-07-01", timeout_seconds=5, first_timeout_seconds=5)
        )
        nothing, samples, counts, requests = [], [], [], []
        for _ in range(_POLLS):
            never.wait(_WAIT_SECONDS)
            nothing.append(_cpu_seconds(lambda: None))
            samples.append(_cpu_seconds(lambda: sampler.sample_poll(0.0)))
            requests.append(_cpu_seconds(imds.scheduled_events))
            counts.append(_cpu_seconds(clocks.read))
        imds.close()
    sample = median(samples) - median(nothing) + (median(counts) - median(nothing)) / _POLLS_PER_COUNT
    ratio = sample / median(requests)
    figure(f"idle sampler: {sample * 1e6:.0f} us a poll, {ratio:.3f} of the request of a poll on the same thread")
    assert ratio <= _MOST_OF_THE_REQUEST
