"""The load of the outbox on a machine that is out of descriptors or threads."""

import threading

import pytest
from starved import no_descriptors, no_threads

from bridge.agent.loading import OutboxLoad
from bridge.agent.parts import Parts
from bridge.config.loader import read
from bridge.errors import StateDirectoryError
from bridge.metrics.metrics import Metrics
from bridge.outbox.locks import DirectoryLock


@pytest.fixture
def settings():
    return read({"imds": {"endpoint": "http://127.0.0.1:9"}, "status": {"listen": ""}, "sinks": [{"type": "stdout"}]})


def close(opened):
    opened.outbox.close()
    opened.lock.release()


def test_a_load_without_descriptors_goes_on_when_there_are_some(settings, tmp_path, caplog):
    with no_descriptors():
        load = OutboxLoad(settings, tmp_path / "state")
        assert not load.is_done_soon()
    close(load.result())
    assert len([each for each in caplog.records if "cannot be loaded for now" in each.message]) == 1


def test_a_directory_that_another_agent_has_ends_the_load(settings, tmp_path):
    lock = DirectoryLock(tmp_path)
    load = OutboxLoad(settings, tmp_path)
    with pytest.raises(StateDirectoryError, match="Another agent"):
        load.result()
    lock.release()


def test_nothing_is_handed_over_while_no_thread_can_be_started(settings, tmp_path):
    load = OutboxLoad(settings, tmp_path / "state")
    opened = load.result()
    parts = Parts(
        settings,
        opened.outbox,
        directory=tmp_path / "state",
        lock=opened.lock,
        metrics=Metrics(),
        turn=threading.Event(),
    )
    with no_threads():
        assert not load.may_hand_over(parts)
    assert load.may_hand_over(parts)
    close(opened)
