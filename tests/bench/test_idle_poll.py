"""One poll that brings nothing new, against a bare loop in the same process, and what it writes to disk: nothing."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median

import pytest
import requests

from bridge.clock import Clock
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox
from bridge.polling.poller import Poller

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_MOST_OF_BARE = 1.2
_POLLS = 10_000
_BLOCKS = 20
_POLLS_BEFORE = 100
_LIVENESS_SECONDS = 600


class _Identity:
    vm = VmIdentity(name="bench-vm")


@dataclass
class _Clock:
    """Goes on by *step_seconds* with each poll."""

    step_seconds: float
    wall: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    monotonic_seconds: float = 0.0

    def now(self):
        return self.wall

    def monotonic(self):
        return self.monotonic_seconds

    def step(self):
        self.wall += timedelta(seconds=self.step_seconds)
        self.monotonic_seconds += self.step_seconds


@pytest.fixture
def outbox(tmp_path):
    """Return a real outbox."""
    (tmp_path / "state").mkdir()
    with closing(Outbox(tmp_path / "state", max_bytes=1 << 28, keep_delivered_seconds=604_800)) as outbox:
        assert outbox.wait_loaded(10)
        yield outbox


@pytest.fixture
def make_poller(serve, outbox):
    """Return what makes a poller over a real document server and a real outbox."""
    with ExitStack() as stack:

        def make(**options):
            imds = ImdsClient(
                endpoint=serve().endpoints[0], api_version="2020-07-01", timeout_seconds=5, first_timeout_seconds=5
            )
            stack.enter_context(closing(imds))
            return Poller(
                imds,
                outbox,
                _Identity(),
                metrics=Metrics(),
                boot_id="one boot",
                poll_interval_seconds=1.0,
                **options,
            )

        yield make


def _cpu_micros(poll, times):
    """Return the CPU time of one call of *poll*, of all threads of this process, as the mean of *times*."""
    before = time.process_time_ns()
    for _ in range(times):
        poll()
    return (time.process_time_ns() - before) / times / 1000


def _write_calls():
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(fields["syscw"])


def test_idle_poll_costs_at_most_a_fifth_more_than_a_bare_loop(make_poller, serve, figure):
    poller = make_poller()
    url = serve().urls[0]
    ours, bare = [], []
    with requests.Session() as session:
        session.trust_env = False

        def bare_poll():
            json.loads(session.get(url, headers={"Metadata": "true"}, timeout=5).content)

        for _ in range(_POLLS_BEFORE):
            poller.poll_once()
            bare_poll()
        for _ in range(_BLOCKS):
            ours.append(_cpu_micros(poller.poll_once, _POLLS // _BLOCKS))
            bare.append(_cpu_micros(bare_poll, _POLLS // _BLOCKS))
    ratio = median(ours) / median(bare)
    figure(
        f"idle poll CPU ratio {ratio:.2f} (medians of {_BLOCKS} blocks, {_POLLS} polls; "
        f"ours {median(ours):.0f} us, bare {median(bare):.0f} us; last two blocks {ours[-1] / bare[-1]:.2f})"
    )
    assert ratio <= _MOST_OF_BARE


def test_idle_polls_within_ten_minutes_write_nothing(make_poller, outbox, files, figure):
    clock = _Clock(step_seconds=_LIVENESS_SECONDS / (_POLLS + 1))
    poller = make_poller(clock=Clock(now=clock.now, monotonic=clock.monotonic))
    for number in range(_POLLS):
        if number == _POLLS_BEFORE:
            assert outbox.wait_saved(10)
            before, calls = files(), _write_calls()
        poller.poll_once()
        clock.step()
    written = _write_calls() - calls
    figure(f"idle poll disk writes {written} (write calls from poll {_POLLS_BEFORE} to {_POLLS}; no file changed)")
    assert files() == before
    assert written == 0


def test_idle_polls_for_hours_write_once_in_ten_minutes(make_poller, files, figure):
    clock = _Clock(step_seconds=1.0)
    poller = make_poller(clock=Clock(now=clock.now, monotonic=clock.monotonic))
    poller.poll_once()
    writes = 0
    seen = files()
    for _ in range(_POLLS):
        clock.step()
        poller.poll_once()
        # One look in the middle of each ten minutes: the write is done on another thread.
        if clock.monotonic_seconds % _LIVENESS_SECONDS == _LIVENESS_SECONDS / 2:
            before, seen = seen, files()
            writes += seen != before
    looks = int(_POLLS / _LIVENESS_SECONDS + 0.5)
    figure(f"idle writes in {_POLLS / 3600:.1f} h {writes} (the time of the last good answer, once in ten minutes)")
    assert 0 < writes <= looks  # none would mean that this test sees no write at all
