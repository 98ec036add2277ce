"""A decision is compared only with later documents, and an absence counts only when it is confirmed.

The poll, its tracker and the approver work together here as in the agent; what the metadata service says is set by
hand, and time stands on a dial.
"""

import pytest

from bridge.errors import ImdsStatus
from bridge.events.event import Document
from bridge.metrics.metrics import Metrics
from bridge.polling.poller import Poller


class Watched:
    """A VM whose poll and approver get the document that `show` sets in the metadata service."""

    deadline_seconds = 5.0

    def __init__(self, kit):
        self.kit = kit
        self.document = Document(incarnation=1)
        self.on_request = None
        self.poller = None

    vm = property(lambda self: self.kit.vm)

    is_waiting = False

    def start(self):
        kit = self.kit
        self.poller = Poller(
            self,
            kit.outbox,
            self,
            metrics=Metrics(),
            boot_id="boot-1",
            poll_interval_seconds=1.0,
            approvals=kit.approver,
            clock=kit.clock,
        )

    def scheduled_events(self):
        answer = self.document
        if self.on_request is not None:
            self.on_request()
        return answer

    def show(self, *events, incarnation):
        self.document = self.kit.imds.document = Document(incarnation=incarnation, events=events)

    def poll(self, *, times=1, turn=True):
        for _ in range(times):
            self.kit.wait(1)
            self.poller.poll_once()
            if turn:
                self.kit.turn()


@pytest.fixture
def vm(kit):
    watched = Watched(kit)
    watched.start()
    return watched


@pytest.mark.parametrize(
    "before",
    [{"not_before_raw": "an earlier time"}, {"event_status": "Started"}, None],
    ids=["changed", "status", "absent"],
)
def test_decision_is_not_refused_because_of_an_older_document(kit, vm, before):
    vm.show(*([] if before is None else [kit.event(**before)]), incarnation=5)
    vm.poll()
    kit.wait(1)
    kit.offer(kit.token(kit.event()))
    assert kit.outcomes == []
    vm.show(kit.event(), incarnation=6)
    vm.poll(times=5)  # a step back from Started to Scheduled must be confirmed
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_decision_is_not_refused_because_of_an_earlier_imds_request(kit, vm):
    vm.show(kit.event(not_before_raw="an earlier time"), incarnation=5)
    vm.poll()

    def come_meanwhile():
        vm.on_request = None
        kit.wait(1)
        kit.approver.receive([kit.token(kit.event())])
        kit.turn()
        kit.wait(1)

    vm.on_request = come_meanwhile
    vm.poll()
    assert kit.outcomes == []
    vm.show(kit.event(), incarnation=6)
    vm.poll()
    assert kit.imds.posts == [["E-1"]]


def test_decision_on_a_changed_event_is_refused_at_the_next_document(kit, vm):
    vm.show(kit.event(not_before_raw="a later time"), incarnation=5)
    vm.poll()
    kit.wait(1)
    kit.offer(kit.token(kit.event()))
    vm.poll()
    assert kit.outcomes == [("approval_refused", "event_changed")]
    assert kit.imds.posts == []


def test_unconfirmed_absence_keeps_an_approval(kit, vm):
    vm.show(kit.event(), incarnation=5)
    vm.poll()
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.offer(kit.token(kit.event()))
    kit.imds.answer = None
    vm.show(incarnation=1)
    vm.poll()
    kit.wait(30)
    vm.poll()
    assert len(kit.imds.posts) == 1  # no request for an absent event
    vm.show(kit.event(), incarnation=2)
    vm.poll()
    assert kit.imds.posts == [["E-1"], ["E-1"]]
    assert kit.outcomes == [("approval_failed", "rejected"), ("approved", "accepted")]


def test_confirmed_absence_ends_an_approval(kit, vm):
    vm.show(kit.event(), incarnation=5)
    vm.poll()
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.offer(kit.token(kit.event()))
    vm.show(incarnation=1)
    vm.poll(times=4)
    assert kit.outcomes == [("approval_failed", "rejected")]
    vm.poll()
    assert kit.outcomes == [("approval_failed", "rejected"), ("approval_failed", "gave_up")]
