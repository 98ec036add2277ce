"""From the answer that brings a change to the record where it is wanted: what the agent adds to its poll interval.

The way to standard output is printed and not judged. That to a webhook is measured beside two busy loops, and there too
beside a bare program (bare_relay.py) that does the same with one commit and no second thread: on a machine with other
work to do each wake-up of a thread waits for its turn, and each commit for the disk, whoever asks for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import quantiles

import pytest

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="compares the monotonic clocks of two processes"),
]

_INTERVAL_SECONDS = 0.2
_BUSY_LOOPS = 2
_WARM_UP = 6
_MOST_MS = 50
#: The transitions that count with the first response. An ending needs five responses.
_AT_ONCE = ("scheduled", "started")


@pytest.fixture
def start_busy_loops(processes, env):
    """Return what starts two loops that want a whole core each, as urgently as the agent wants one."""

    def start():
        for _ in range(_BUSY_LOOPS):
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"], env=env))

    return start


@pytest.fixture
def start_both(start_agent, start_bare_relay):
    """Return what starts the agent on the first machine of a document server, and a bare relay on the second."""

    def start(documents):
        ours, bare = documents.endpoints
        start_agent(
            "agent",
            ours,
            sinks=f'[[sinks]]\ntype = "webhook"\nurl = "{ours}/hook"',
            poll_interval_seconds=_INTERVAL_SECONDS,
            stdout=subprocess.DEVNULL,
        )
        start_bare_relay(documents.urls[1], f"{bare}/hook", _INTERVAL_SECONDS)

    return start


def test_latency_from_changed_document_to_stdout(serve, start_agent, figure, is_short):
    changes = 60 if is_short else 300
    documents = serve(changes=changes, polls_a_change=2, events=1)
    agent = start_agent(
        "agent",
        documents.endpoints[0],
        sinks='[[sinks]]\ntype = "stdout"',
        poll_interval_seconds=0.2,
        stdout=subprocess.PIPE,
    )
    told, printed = documents.changes(), agent.process.stdout
    latencies_ms = []
    for _ in range(changes):
        # The first record after a start comes behind an empty line: it ends what a killed agent may have left.
        record = json.loads(next(line for line in iter(printed.readline, b"") if line.strip()))
        seen_at = time.monotonic()
        if record["transition"] not in _AT_ONCE:
            continue
        change = next(each for each in told if each["incarnation"] == record["incarnation"])
        latencies_ms.append((seen_at - change["monotonic_seconds"]) * 1000)
    percentiles = quantiles(latencies_ms, n=100, method="inclusive")
    figure(
        f"change to stdout p50 {percentiles[49]:.1f} ms, p99 {percentiles[98]:.1f} ms "
        f"({changes} changes, from the poll's answer to the line read)"
    )
    assert len(latencies_ms) == changes // 3 * 2


def test_latency_to_a_webhook_beside_two_busy_loops(serve, start_both, start_busy_loops, figure, is_short):
    changes = 200 if is_short else 600
    documents = serve(ports=2, changes=changes + _WARM_UP, events=1)
    start_both(documents)
    start_busy_loops()
    ours, bare = _latencies_ms(documents, changes + _WARM_UP)
    figure(
        f"change to webhook beside {_BUSY_LOOPS} busy loops, beyond the poll ({changes} changes): "
        f"ours {_words(ours)}; bare {_words(bare)}"
    )
    assert _p99(ours) < _MOST_MS


def _latencies_ms(documents, changes):
    """Return, for each port, the milliseconds from each response with events to its webhook, without the first few."""
    shown, taken = {}, {port: {} for port in documents.ports}
    count = changes // 3 * 2
    for told in documents.changes():
        if told["incarnation"] % 3 == 1:  # no events: the agent sends the ending after five responses
            continue
        key = (told["port"], told["incarnation"])
        if "taken_seconds" in told:
            taken[told["port"]][told["incarnation"]] = (told["taken_seconds"] - shown[key]) * 1000
            if all(len(found) >= count for found in taken.values()):
                break
        else:
            shown[key] = told["monotonic_seconds"]
    return [list(found.values())[_WARM_UP:] for found in taken.values()]


def _p99(latencies_ms):
    return quantiles(latencies_ms, n=100, method="inclusive")[98]


def _words(latencies_ms):
    percentiles = quantiles(latencies_ms, n=100, method="inclusive")
    p50, p95 = percentiles[49], percentiles[94]
    return f"p50 {p50:.1f}, p95 {p95:.1f}, p99 {_p99(latencies_ms):.1f}, max {max(latencies_ms):.1f} ms"
