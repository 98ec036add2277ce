"""A sink that got a record of an event gets the records of this event until its end."""

import pytest
from outbox_kit import append

from bridge.delivery.router import Router
from bridge.events.event import Document, VmIdentity
from bridge.events.record import Approval
from bridge.sink import SinkConfig

ME = "vm_0"
KEPT_SECONDS = 60.0


class Life:
    """An event that changes, and the outbox of an agent whose only sink has *filters*."""

    def __init__(self, kit, **filters):
        self._kit = kit
        self.outbox = kit.open(sinks=(), keep_delivered_seconds=KEPT_SECONDS)
        self.outbox.identify(VmIdentity(name=ME))
        self.configure(**filters)

    def configure(self, **filters):
        routes = Router([SinkConfig(name="s", **filters)])
        self.outbox.configure(routes, ["s"], labels={})

    def goes(self, transition, event_type="Reboot", *, is_over=False, **fields):
        """Commit a record, deliver all due records, and return the transitions that the sink got."""
        event = self._kit.event(**{"resources": (ME,), **fields, "event_type": event_type})
        document = Document(incarnation=1, events=() if is_over else (event,))
        self._kit.commit(self.outbox, event, transition=transition, document=document)
        return self._take()

    def is_approved(self, **fields):
        """Record that this VM approved the event, and return the same as `goes`."""
        event = self._kit.event(**{"resources": (ME,), **fields, "event_type": "Reboot"})
        approval = Approval(source="cli", result="accepted")
        append(self.outbox, "approved", event=event, approval=approval)
        self._kit.saved(self.outbox)
        return self._take()

    def _take(self):
        rows = self.outbox.select("s", list)
        self._kit.settle(self.outbox, "s", *(row.sequence for row in rows))
        return [row.record.transition.value for row in rows]


def test_sink_for_reboots_gets_all_records_of_a_reboot_that_becomes_a_freeze(kit):
    life = Life(kit, event_types=("Reboot",))
    assert life.goes("scheduled") == ["scheduled"]
    assert life.goes("updated", "Freeze") == ["updated"]
    assert life.goes("started", "Freeze") == ["started"]
    assert life.goes("completed", "Freeze", is_over=True) == ["completed"]


def test_event_that_changes_to_a_matching_type_is_sent_from_then_on(kit):
    life = Life(kit, event_types=("Reboot",))
    assert life.goes("scheduled", "Freeze") == []
    assert life.goes("updated") == ["updated"]
    assert life.goes("updated", "Freeze") == ["updated"]
    assert life.goes("ended", "Freeze", is_over=True) == ["ended"]


@pytest.mark.parametrize(
    ("filters", "change"),
    [({"event_sources": ("Platform",)}, {"event_source": "User"}), ({"scope": "mine"}, {"resources": ("vm_1",)})],
    ids=["source", "scope"],
)
def test_event_that_stops_matching_another_filter_is_sent_until_its_end(kit, filters, change):
    life = Life(kit, **filters)
    assert life.goes("scheduled", event_source="Platform") == ["scheduled"]
    assert life.goes("updated", **change) == ["updated"]
    assert life.goes("canceled", **change, is_over=True) == ["canceled"]


def test_sink_gets_only_its_transitions_and_only_of_events_it_got(kit):
    life = Life(kit, event_types=("Reboot",), transitions=("scheduled", "completed"))
    assert life.goes("scheduled") == ["scheduled"]
    assert life.goes("updated", "Freeze") == []
    assert life.goes("completed", "Freeze", is_over=True) == ["completed"]
    other = {"event_id": "E-2"}
    life.configure(event_types=("Reboot",), transitions=("started", "completed"))
    assert life.goes("scheduled", **other) == []
    assert life.goes("started", "Freeze", **other) == []
    assert life.goes("completed", "Freeze", **other, is_over=True) == []


def test_reused_event_id_after_a_sent_ending_is_a_new_event(kit):
    life = Life(kit, event_types=("Reboot",))
    assert life.goes("scheduled") == ["scheduled"]
    assert life.goes("completed", is_over=True) == ["completed"]
    assert life.goes("started", "Freeze") == []
    assert life.goes("completed", "Freeze", is_over=True) == []


def test_approving_vm_sends_only_the_approval_with_speak_first(kit):
    life, both = Life(kit, speak="first"), {"resources": ("vm_1", ME)}
    assert life.goes("scheduled", **both) == []
    assert life.is_approved(**both) == ["approved"]
    assert life.goes("started", **both) == []
    assert life.goes("completed", **both, is_over=True) == []
