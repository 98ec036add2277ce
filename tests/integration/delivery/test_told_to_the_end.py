"""Which sinks get the records of an event that changes: who was told of it is told of it to its end."""

import pytest
from outbox_kit import OutboxKit, append

from bridge.delivery.router import Router
from bridge.events.event import Document, VmIdentity
from bridge.events.record import Approval
from bridge.sink import SinkConfig

ME = "vm_0"
KEPT_SECONDS = 60.0


@pytest.fixture
def kit(tmp_path):
    made = OutboxKit(tmp_path)
    yield made
    made.close()


class Life:
    """An event that changes, and the outbox of an agent whose one sink takes what *filters* say."""

    def __init__(self, kit, **filters):
        self._kit = kit
        self.outbox = kit.open(sinks=(), keep_delivered_seconds=KEPT_SECONDS)
        self.outbox.identify(VmIdentity(name=ME))
        self.configure(**filters)

    def configure(self, **filters):
        routes = Router([SinkConfig(name="s", **filters)])
        self.outbox.configure(routes, ["s"], labels={})

    def goes(self, transition, event_type="Reboot", *, is_over=False, **fields):
        """Commit a record, let the sink take all that is due, and return the transitions that it got."""
        event = self._kit.event(**{"resources": (ME,), **fields, "event_type": event_type})
        document = Document(incarnation=1, events=() if is_over else (event,))
        self._kit.commit(self.outbox, event, transition=transition, document=document)
        return self._take()

    def is_approved(self, **fields):
        """Add that this VM approved the event, and return as `goes` does."""
        event = self._kit.event(**{"resources": (ME,), **fields, "event_type": "Reboot"})
        approval = Approval(source="cli", result="accepted")
        append(self.outbox, "approved", event=event, approval=approval)
        self._kit.saved(self.outbox)
        return self._take()

    def _take(self):
        rows = self.outbox.select("s", list)
        self._kit.settle(self.outbox, "s", *(row.sequence for row in rows))
        return [row.record.transition.value for row in rows]


def test_a_reboot_that_becomes_a_freeze_is_told_to_its_end_to_a_sink_that_takes_reboots(kit):
    life = Life(kit, event_types=("Reboot",))
    assert life.goes("scheduled") == ["scheduled"]
    assert life.goes("updated", "Freeze") == ["updated"]
    assert life.goes("started", "Freeze") == ["started"]
    assert life.goes("completed", "Freeze", is_over=True) == ["completed"]


def test_an_event_that_becomes_of_the_type_is_told_from_then_on(kit):
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
def test_an_event_that_leaves_another_filter_is_told_to_its_end(kit, filters, change):
    life = Life(kit, **filters)
    assert life.goes("scheduled", event_source="Platform") == ["scheduled"]
    assert life.goes("updated", **change) == ["updated"]
    assert life.goes("canceled", **change, is_over=True) == ["canceled"]


def test_a_sink_gets_only_the_transitions_it_takes_and_none_of_an_event_that_it_was_not_told_of(kit):
    life = Life(kit, event_types=("Reboot",), transitions=("scheduled", "completed"))
    assert life.goes("scheduled") == ["scheduled"]
    assert life.goes("updated", "Freeze") == []
    assert life.goes("completed", "Freeze", is_over=True) == ["completed"]
    other = {"event_id": "E-2"}
    life.configure(event_types=("Reboot",), transitions=("started", "completed"))
    assert life.goes("scheduled", **other) == []
    assert life.goes("started", "Freeze", **other) == []
    assert life.goes("completed", "Freeze", **other, is_over=True) == []


def test_an_event_id_that_comes_again_after_its_end_was_told_is_a_new_event(kit):
    life = Life(kit, event_types=("Reboot",))
    assert life.goes("scheduled") == ["scheduled"]
    assert life.goes("completed", is_over=True) == ["completed"]
    assert life.goes("started", "Freeze") == []
    assert life.goes("completed", "Freeze", is_over=True) == []


def test_a_vm_that_approved_an_event_tells_that_alone_where_the_first_vm_speaks(kit):
    life, both = Life(kit, speak="first"), {"resources": ("vm_1", ME)}
    assert life.goes("scheduled", **both) == []
    assert life.is_approved(**both) == ["approved"]
    assert life.goes("started", **both) == []
    assert life.goes("completed", **both, is_over=True) == []
