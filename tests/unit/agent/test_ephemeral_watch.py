"""What is said of a state directory that would be lost: once, and again only when there is news."""

import logging
import re
from pathlib import Path

import pytest

from bridge.agent.ephemeral_watch import EphemeralWatch
from bridge.metrics.metrics import Metrics
from bridge.system.ephemeral_disk import why_ephemeral


@pytest.fixture
def shown():
    metrics = Metrics()

    def value():
        [line] = [
            line for line in metrics.exposition().decode().splitlines() if re.match(r"[a-z_]*ephemeral_disk ", line)
        ]
        return float(line.split()[-1])

    return metrics, value


def test_memory_is_said_once_and_shown(shown, caplog):
    if why_ephemeral(Path("/dev/shm"), os_disk_is_ephemeral=None) is None:  # looked at, not written to
        pytest.skip("/dev/shm is no memory here")
    metrics, value = shown
    watch = EphemeralWatch(Path("/dev/shm"), metrics, lambda: None)
    for _ in range(3):
        watch.look()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "state.directory" in caplog.text
    assert value() == 1


def test_what_imds_says_is_heard_and_not_forgotten_when_it_is_silent(shown, caplog, tmp_path):
    metrics, value = shown
    told = [None]
    watch = EphemeralWatch(tmp_path, metrics, lambda: told[0])
    watch.look()
    before = value()
    told[0] = True
    watch.look()
    expected = why_ephemeral(tmp_path, os_disk_is_ephemeral=True)
    assert value() == (expected is not None)
    assert value() >= before
    said = len(caplog.records)
    told[0] = None
    watch.look()
    assert value() == (expected is not None)
    assert len(caplog.records) == said
