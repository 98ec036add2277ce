"""From the answer that brings a change to the record on standard output: what the agent adds to its poll interval.

Printed and not judged: no figure is promised for it, and a time is the machine's.
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
        record = json.loads(printed.readline())
        seen_at = time.monotonic()
        change = next(told)
        assert change["incarnation"] == record["incarnation"]
        latencies_ms.append((seen_at - change["monotonic_seconds"]) * 1000)
    percentiles = quantiles(latencies_ms, n=100, method="inclusive")
    figure(
        f"change to stdout p50 {percentiles[49]:.1f} ms, p99 {percentiles[98]:.1f} ms "
        f"({changes} changes, from the poll's answer to the line read)"
    )
    assert len(latencies_ms) == changes
