"""The outbox in memory that an agent begins with while its own is being loaded: what waits, and what is taken along."""

from datetime import timedelta

import pytest

from bridge.delivery.router import Router
from bridge.events.event import Document, VmIdentity
from bridge.events.record import Transition
from bridge.outbox import deliveries
from bridge.outbox.unloaded import keep_taken, open_unloaded, read_taken
from bridge.sink import SinkConfig

VM = VmIdentity(name="vm_0", vm_id="1")
MINE = {"resources": ("vm_0",)}


@pytest.fixture
def unloaded(kit):
    outbox = open_unloaded(kit.directory, max_bytes=2**20, keep_delivered_seconds=60.0, ages=kit.ages)
    outbox.identify(VM).result()
    configure(outbox)
    yield outbox
    outbox.close()


def configure(outbox):
    sinks = [SinkConfig(name="mine"), SinkConfig(name="all", scope="all")]
    names = [sink.name for sink in sinks]
    outbox.write(outbox.records.configure, Router(sinks), names, labels={}).result()


def told(outbox, sink="mine"):
    rows = outbox.read(deliveries.due, sink, limit=9).result()
    return [(row.record.event.event_id, row.record.transition.value) for row in rows]


def change(kit, outbox, *events, transition, previous=None, document=None):
    """Commit a change of *events*, which had a status before."""
    observation = kit.observation(outbox, *events, transition=transition, document=document or Document(events=events))
    changes = [type(each)(**{**_fields(each), "previous": previous}) for each in observation.changes]
    observation = type(observation)(**{**_fields(observation), "changes": changes})
    return outbox.write(outbox.records.append_observation, observation).result(60)


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_what_the_first_document_shows_waits_unless_it_is_urgent_or_near(kit, unloaded):
    soon, later = kit.time + timedelta(seconds=30), kit.time + timedelta(minutes=10)
    kit.commit(
        unloaded,
        kit.event("known", not_before=later, **MINE),
        kit.event("near", not_before=soon, **MINE),
        kit.event("P-1", event_type="Preempt", **MINE),
        kit.event("P-2", event_type="Preempt", resources=("vm_9",)),
    )
    assert told(unloaded) == told(unloaded, "all") == [("P-1", "scheduled"), ("near", "scheduled")]
    kit.commit(unloaded, kit.event("new", not_before=later, **MINE))
    assert told(unloaded)[2:] == [("new", "scheduled")]
    unloaded.write(unloaded.records.end_hold).result()
    assert sorted(told(unloaded, "all")) == sorted(
        (each, "scheduled") for each in ("P-1", "P-2", "near", "known", "new")
    )


def test_what_waited_of_an_event_goes_before_its_start(kit, unloaded):
    kit.commit(unloaded, kit.event("E-1", **MINE), kit.event("E-2", **MINE))
    assert told(unloaded) == []
    change(
        kit, unloaded, kit.event("E-1", "Started", **MINE), transition="started", previous={"event_status": "Scheduled"}
    )
    assert told(unloaded) == [("E-1", "scheduled"), ("E-1", "started")]
    change(kit, unloaded, kit.event("E-2", **MINE), transition="canceled", previous=None, document=Document())
    assert told(unloaded) == [("E-1", "scheduled"), ("E-1", "started")]


def test_while_who_this_is_is_not_known_an_eviction_is_told_and_all_else_waits(kit):
    outbox = open_unloaded(kit.directory, max_bytes=2**20, keep_delivered_seconds=60.0, ages=kit.ages)
    outbox.records.await_identity()
    configure(outbox)
    kit.commit(outbox, kit.event("known"), kit.event("P-1", event_type="Preempt"))
    assert told(outbox) == []
    outbox.write(outbox.records.stop_waiting).result()
    assert told(outbox) == [("P-1", "scheduled")]
    outbox.close()


def test_nothing_of_it_touches_the_disk(kit, unloaded):
    kit.commit(unloaded, kit.event("E-1", **MINE))
    unloaded.tend().result()
    unloaded.clean().result()
    assert unloaded.in_memory
    assert not kit.directory.exists()


def test_what_a_sink_took_before_is_not_sent_to_it_again(kit, unloaded):
    kit.commit(unloaded, kit.event("P-1", event_type="Preempt", **MINE), kit.event("P-2", event_type="Preempt", **MINE))
    kit.settle(unloaded, "mine", 1)
    unloaded.write(deliveries.mark_started, "all", "P-2", now=0.0).result()
    taken = unloaded.read(read_taken).result()

    outbox = kit.open(sinks=())
    outbox.identify(VM).result()
    configure(outbox)
    # The one was told by the agent before, and is pending; the other one is new.
    kit.commit(outbox, kit.event("P-1", event_type="Preempt", **MINE))
    outbox.write(keep_taken, taken, now=0.0).result()
    outbox.records.taken = taken
    kit.commit(outbox, kit.event("P-2", event_type="Preempt", **MINE))
    assert told(outbox) == [("P-2", "scheduled")]
    assert told(outbox, "all") == [("P-1", "scheduled"), ("P-2", "scheduled")]
    mine = kit.totals(outbox)["mine"]
    assert (mine["accepted"], mine["delivered"], mine["pending"]) == (2, 1, 1)
    assert outbox.write(deliveries.mark_started, "all", "P-2", now=0.0).result().is_new is False


def test_an_ending_that_was_told_is_stored_in_the_same_words(kit, unloaded):
    """What was seen between was too much to be kept: the stored outbox knows no start, and finds the event gone."""
    kit.commit(unloaded, kit.event("E-1", "Started", event_type="Preempt", **MINE), transition="started")
    ended = kit.commit(
        unloaded, kit.event("E-1", "Started", event_type="Preempt", **MINE), transition="completed", document=Document()
    )
    kit.settle(unloaded, "mine", *(record.sequence for record in ended))
    taken = unloaded.read(read_taken).result()

    outbox = kit.open(sinks=())
    outbox.identify(VM).result()
    configure(outbox)
    kit.commit(outbox, kit.event("E-1", event_type="Preempt", **MINE), kit.event("E-2", **MINE))
    outbox.records.taken = taken
    gone = [kit.event("E-1", event_type="Preempt", **MINE), kit.event("E-2", **MINE)]
    (stored, other) = kit.commit(outbox, *gone, transition="ended", document=Document())
    assert (stored.transition, stored.id) == (Transition.COMPLETED, ended[0].id)
    assert stored.sequence == 3
    assert other.transition is Transition.ENDED
    assert ("E-1", "completed") not in told(outbox)
    # And what ends once more later is an ending of its own.
    (again,) = kit.commit(outbox, gone[0], transition="ended", document=Document())
    assert again.transition is Transition.ENDED


def test_a_sink_that_is_new_is_not_told_how_an_event_was_before_what_it_heard_of_it(kit, unloaded):
    outbox = kit.open(sinks=())
    outbox.identify(VM).result()
    kit.commit(outbox, kit.event("E-1", **MINE), kit.event("E-2", **MINE))
    ended = kit.commit(
        unloaded, kit.event("E-1", "Started", event_type="Preempt", **MINE), transition="completed", document=Document()
    )
    kit.settle(unloaded, "mine", *(record.sequence for record in ended))
    outbox.records.taken = unloaded.read(read_taken).result()
    configure(outbox)
    assert told(outbox, "mine") == [("E-2", "scheduled")]
    assert told(outbox, "all") == [("E-1", "scheduled"), ("E-2", "scheduled")]


def test_what_was_owed_of_an_event_is_given_up_where_later_news_of_it_was_told(kit, unloaded):
    """The sink `mine` pages: the announcement that it never got would page for what is over."""
    outbox = kit.open(sinks=("mine", "all"))
    kit.commit(outbox, kit.event("E-1", **MINE), kit.event("E-2", **MINE))
    kit.commit(unloaded, kit.event("E-1", event_type="Preempt", **MINE), kit.event("E-9", event_type="Preempt", **MINE))
    for sink in ("mine", "all"):
        first = unloaded.read(deliveries.due, sink, limit=9).result()[0]
        assert first.record.event.event_id == "E-1"
        kit.settle(unloaded, sink, first.record.sequence)
    taken = unloaded.read(read_taken).result()
    outbox.write(keep_taken, taken, now=0.0, skipping={"mine"}).result()
    assert told(outbox, "mine") == [("E-2", "scheduled")]
    assert told(outbox, "all") == [("E-1", "scheduled"), ("E-2", "scheduled")]
    assert kit.totals(outbox)["mine"]["expired"] == 1
