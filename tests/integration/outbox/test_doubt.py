"""What is stored may be another machine's, which came with an image: what is told meanwhile, and what becomes of it."""

import subprocess
import sys

import outbox_kit
import pytest

from bridge.delivery.router import Router
from bridge.events.event import Document, VmIdentity
from bridge.outbox import deliveries, meta
from bridge.sink import SinkConfig

GOLDEN = VmIdentity(name="golden", vm_id="GOLDEN")
CLONE = VmIdentity(name="clone", vm_id="CLONE")
UNKNOWN = VmIdentity()


@pytest.fixture
def image(kit):
    """The outbox of the golden machine, which knows of E-1, as a clone finds it."""
    outbox = kit.open()
    outbox.identify(GOLDEN).result()
    kit.commit(outbox, kit.event("E-1"))
    kit.settle(outbox, "a", 1)
    outbox.close()
    return kit


def in_doubt(kit, vm=UNKNOWN, *, boot_id="boot-2", waits=False, **options):
    """Start as an agent that is not told who it is; with *waits* records still wait for that."""
    outbox = kit.open(**options)
    outbox.records.boot_id = boot_id
    outbox.write(outbox.records.distrust_stored, vm).result()
    if not waits:
        outbox.write(outbox.records.stop_waiting).result()
    return outbox


def owed(outbox, sink="a"):
    rows = outbox.read(deliveries.due, sink, limit=9).result()
    return [(row.record.event.event_id, row.record.transition.value, row.record.id) for row in rows]


def told(outbox, sink="a"):
    return [(event_id, transition) for event_id, transition, _ in owed(outbox, sink)]


def end(kit, outbox, *events, transition="canceled"):
    return kit.commit(outbox, *events, transition=transition, document=Document(), boot_id="boot-2")


def test_a_configured_name_chooses_sinks_at_once_while_what_is_stored_waits(image):
    kit = image
    outbox = kit.open(sinks=())
    outbox.write(outbox.records.configure, Router([SinkConfig(name="mine")]), ["mine"], labels={}).result()
    outbox.write(outbox.records.distrust_stored, VmIdentity(name="vm_7")).result()
    mine, other = kit.event("E-2", resources=("vm_7",)), kit.event("E-3", resources=("vm_9",), event_type="Preempt")
    kit.commit(outbox, mine, other)
    (row,) = outbox.read(deliveries.due, "mine", limit=9).result()
    assert (row.record.event.event_id, row.record.vm.name, row.record.affects_this_vm) == ("E-2", "vm_7", True)


@pytest.mark.parametrize("is_told_who_it_is_at_once", [True, False])
def test_what_a_clone_told_is_its_own_after_a_restart_too(image, is_told_who_it_is_at_once):
    kit = image
    outbox = in_doubt(kit)
    kit.commit(outbox, kit.event("P-1"), boot_id="boot-2")
    before = owed(outbox)
    outbox.close()

    outbox = kit.open()
    outbox.records.boot_id = "boot-2"
    if not is_told_who_it_is_at_once:
        outbox.write(outbox.records.distrust_stored, UNKNOWN).result()
    assert outbox.identify(CLONE).result() is True
    state = outbox.read(meta.load).result()
    assert owed(outbox) == before
    assert [event.event_id for event in state.document.events] == ["P-1"]


def test_the_end_of_what_a_clone_told_is_told_after_a_restart(image):
    kit = image
    outbox = in_doubt(kit)
    kit.commit(outbox, kit.event("P-1"), boot_id="boot-2")
    outbox.close()
    outbox = in_doubt(kit)
    end(kit, outbox, kit.event("P-1"), kit.event("E-1"))
    assert told(outbox) == [("P-1", "scheduled"), ("P-1", "canceled")]
    outbox.close()
    outbox = in_doubt(kit)  # the end of E-1 still waits: it may be the other machine's
    assert told(outbox) == [("P-1", "scheduled"), ("P-1", "canceled")]
    assert outbox.identify(CLONE).result() is True
    assert told(outbox) == [("P-1", "scheduled"), ("P-1", "canceled")]


def test_the_same_machine_goes_on_with_all_of_it_after_restarts_in_doubt(image):
    kit = image
    outbox = in_doubt(kit)
    kit.commit(outbox, kit.event("P-1"), boot_id="boot-2")
    outbox.close()
    outbox = in_doubt(kit)
    end(kit, outbox, kit.event("E-1"))
    assert outbox.identify(GOLDEN).result() is False
    assert told(outbox) == [("P-1", "scheduled"), ("E-1", "canceled")]
    assert told(outbox, "b") == [("E-1", "scheduled"), ("P-1", "scheduled"), ("E-1", "canceled")]
    outbox.close()
    outbox = in_doubt(kit)
    assert told(outbox, "b") == []  # all of it is what was there before a new doubt


def test_an_event_that_begins_and_ends_in_the_wait_is_told_of_a_clone(image):
    kit = image
    outbox = in_doubt(kit, waits=True)
    kit.commit(outbox, kit.event("H-1", "Started"), transition="started", boot_id="boot-2")
    end(kit, outbox, kit.event("H-1"), kit.event("E-1"), transition="completed")
    assert outbox.identify(CLONE).result() is True
    assert told(outbox) == [("H-1", "started"), ("H-1", "completed")]
    (row, _) = outbox.read(deliveries.due, "a", limit=9).result()
    assert row.record.vm == CLONE


def test_what_changed_of_an_event_of_the_image_is_not_told_as_a_change_of_the_clones_own(image):
    kit = image
    outbox = in_doubt(kit, waits=True)
    kit.commit(outbox, kit.event("E-1", description="new"), transition="updated", boot_id="boot-2")
    assert outbox.identify(CLONE).result() is True
    assert told(outbox) == []
    assert not outbox.read(meta.load).result().document


def test_what_a_machine_in_doubt_told_is_not_the_clones_of_an_image_that_was_made_then(image):
    kit = image
    outbox = in_doubt(kit)
    kit.commit(outbox, kit.event("P-1"), boot_id="boot-2")
    outbox.close()
    outbox = in_doubt(kit, boot_id="boot-3")
    assert told(outbox) == []
    assert outbox.identify(CLONE).result() is True
    assert told(outbox) == []


def test_the_boot_in_which_imds_answered_in_doubt_is_known_after_a_restart(image):
    kit = image
    outbox = in_doubt(kit)
    kit.wait(60)
    kit.commit(outbox, kit.event("P-1"), boot_id="boot-2")
    answered_at = kit.time
    outbox.close()
    outbox = kit.open()
    state = outbox.read(meta.load).result()
    assert (state.boot_id, state.last_good_at, state.vm_boot_id) == ("boot-2", answered_at, "boot-1")
    outbox.identify(GOLDEN).result()
    state = outbox.read(meta.load).result()
    assert (state.boot_id, state.last_good_at, state.vm_boot_id) == ("boot-2", answered_at, "boot-2")


#: A clone in doubt that tells of an event, learns who it is, and dies before one of the steps by which the database is
#: exchanged: its three files are renamed, and two connections to the new one are opened.
DIES = """
import os, runpy, sys
from pathlib import Path
from bridge.events.event import Document, VmIdentity
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
outbox = kit.open()
outbox.records.boot_id = "boot-2"
outbox.write(outbox.records.distrust_stored, VmIdentity()).result()
kit.commit(outbox, kit.event("H-1", "Started"), transition="started", boot_id="boot-2")
kit.commit(outbox, kit.event("H-1", "Started"), transition="completed", document=Document(), boot_id="boot-2")
outbox.write(outbox.records.stop_waiting).result()
kit.commit(outbox, kit.event("P-1"), boot_id="boot-2")
kit.settle(outbox, "b", 4)
left = [int(sys.argv[3])]
def watch(event, arguments):
    if event == "os.rename" and "other-vm" in str(arguments[1]) or event == "sqlite3.connect" and left[1:]:
        left.append(event)
        if len(left) > left[0] + 1:
            os._exit(9)
sys.addaudithook(watch)
outbox.identify(VmIdentity(name="clone", vm_id="CLONE")).result()
"""


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4])
def test_what_a_clone_told_outlives_a_death_while_the_database_is_exchanged(image, step):
    kit = image
    command = [sys.executable, "-c", DIES, outbox_kit.__file__, str(kit.directory), str(step)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9
    outbox = kit.open()
    outbox.records.boot_id = "boot-2"
    outbox.identify(CLONE).result()
    assert told(outbox) == [("H-1", "started"), ("H-1", "completed"), ("P-1", "scheduled")]
    assert told(outbox, "b") == [("H-1", "started"), ("H-1", "completed")]
    assert [event.event_id for event in outbox.read(meta.load).result().document.events] == ["P-1"]
    assert not (kit.directory / "told.json").exists()
    (record,) = kit.commit(outbox, kit.event("N-1"))
    assert record.sequence == 5
