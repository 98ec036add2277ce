"""The contract suite for the eventlog sink, and its events, with a stand-in for the Windows event log."""

import importlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from local_contract import LocalSinkContract

from bridge.config.loader import read
from bridge.errors import ConfigurationError
from bridge.sink import DeliveryFailed, DeliveryRejected, Transition
from bridge.testing.peers import Peer
from bridge.testing.records import sample_event, sample_record
from sinks.eventlog import EVENT_IDS

STAND_IN = Path(__file__).parents[2] / "kits" / "windows_event_log"
ERROR, WARNING, INFORMATION = 1, 2, 4


@pytest.fixture
def log(monkeypatch):
    if sys.platform == "win32":
        pytest.skip("the test would write to the event log of this machine")
    for name in ("win32evtlog", "pywintypes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(STAND_IN))
    found = importlib.import_module("win32evtlog")
    yield found
    found.may_answer.set()
    for name in ("win32evtlog", "pywintypes"):
        sys.modules.pop(name, None)


def sink_of(**table):
    return read({"sinks": [{"type": "eventlog", **table}]}).sinks[0].build()


class EventLogPeer(Peer):
    def __init__(self, log):
        self._log = log

    @property
    def received(self):
        return [[json.loads(event["strings"][0].split("\r\n\r\n", 1)[1])["id"]] for event in self._log.events]

    def accept(self):
        self._log.refusal.clear()
        self._log.may_answer.set()

    def refuse_for_now(self, retry_after_seconds=None):
        assert retry_after_seconds is None
        self._log.refusal[:] = [(1722, "The RPC server is unavailable.")]

    def stay_silent(self):
        self._log.may_answer.clear()

    def wait_until_busy(self, *, writes_before):
        del writes_before
        deadline = time.monotonic() + 5
        while not self._log.open_handles and time.monotonic() < deadline:
            threading.Event().wait(0.01)

    def close(self):
        self.accept()


class TestEventLogSinkContract(LocalSinkContract):
    sink_type = "eventlog"
    no_network = "the sink calls Windows"
    skips: ClassVar = {
        **LocalSinkContract.skips,
        "test_silence_leaves_no_thread_and_no_socket_behind": "a Windows call cannot be canceled, so one thread waits",
    }

    @pytest.fixture(autouse=True)
    def windows(self, log):
        self.log = log

    def peer(self):
        return EventLogPeer(self.log)


@pytest.mark.parametrize(
    ("transition", "event_type", "level"),
    [
        (Transition.SCHEDULED, "Freeze", INFORMATION),
        (Transition.STARTED, "Reboot", WARNING),
        (Transition.UPDATED, "Redeploy", WARNING),
        (Transition.SCHEDULED, "Preempt", ERROR),
        (Transition.STARTED, "Terminate", ERROR),
        (Transition.COMPLETED, "Preempt", INFORMATION),
        (Transition.APPROVAL_FAILED, None, WARNING),
        (Transition.APPROVED, "Reboot", INFORMATION),
        (Transition.HEARTBEAT, None, INFORMATION),
        (Transition.SCHEDULED, "Novelty", WARNING),
    ],
)
def test_event_has_the_id_of_its_transition_and_the_level_of_its_severity(log, transition, event_type, level):
    event = None if event_type is None else sample_event(event_type=event_type)
    sink = sink_of()
    sink.send([sample_record(transition=transition, event=event)])
    sink.close()
    [found] = log.events
    assert (found["id"], found["kind"]) == (EVENT_IDS[transition], level)
    assert found["strings"][0].startswith("2026-11-20T11:00:01.123Z " + transition.value)
    assert not log.open_handles


def test_record_that_exceeds_the_event_size_is_parked(log):
    sink = sink_of()
    with pytest.raises(DeliveryRejected, match="31839"):
        sink.send([sample_record(event=sample_event(resources=["\U0001f600" * 16_000]))])
    sink.close()
    assert log.events == []


@pytest.mark.parametrize(("number", "needs_a_person"), [(5, True), (1502, True), (1722, False)])
def test_full_log_needs_attention_but_an_unavailable_service_does_not(log, number, needs_a_person):
    log.refusal[:] = [(number, "No.")]
    sink = sink_of()
    with pytest.raises(DeliveryFailed, match=rf"No\. \(error {number}\)") as caught:
        sink.send([sample_record()])
    sink.close()
    assert caught.value.needs_attention is needs_a_person
    assert not log.open_handles


@pytest.mark.skipif(sys.platform == "win32", reason="the sink works on Windows")
def test_configuration_is_rejected_without_windows():
    with pytest.raises(ConfigurationError, match="needs Windows and pywin32"):
        sink_of()
