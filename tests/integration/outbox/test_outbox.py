import re
import sqlite3
import threading
from collections import Counter
from pathlib import Path

import pytest
from starved import no_descriptors

from bridge.delivery.router import Router
from bridge.errors import OutboxError, StreamChanged
from bridge.events.event import Document, VmIdentity
from bridge.events.record import Approval, Transition, record_id, transition_key
from bridge.outbox import deliveries, meta
from bridge.outbox.approvals import ApprovalRecord
from bridge.sink import SinkConfig

ENDS = ("delivered", "pending", "parked", "evicted", "discarded", "expired")


def rows(kit, sql="SELECT sink, sequence, state FROM deliveries ORDER BY sink, sequence"):
    connection = sqlite3.connect(kit.directory / "outbox.db")
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def assert_totals_hold(outbox, kit):
    counted = Counter((sink, state) for sink, _, state in rows(kit))
    for sink, totals in kit.totals(outbox).items():
        assert totals["accepted"] == sum(totals[state] for state in ENDS), (sink, totals)
        assert (totals["pending"], totals["parked"]) == (counted[sink, "pending"], counted[sink, "parked"])


# A document is handled whole.


def test_a_document_is_stored_with_its_records_and_a_row_for_each_sink(kit):
    outbox = kit.open()
    first, second = kit.commit(outbox, kit.event("E-1"), kit.event("E-2"), incarnation=7)
    assert (first.sequence, second.sequence) == (1, 2)
    assert outbox.read(meta.load).result().document.events == (kit.event("E-1"), kit.event("E-2"))
    assert outbox.read(meta.load).result().last_good_at == kit.time
    assert kit.due(outbox, "a") == kit.due(outbox, "b") == [1, 2]


def test_a_document_that_fails_half_way_leaves_nothing_behind(kit):
    def refuse_second(record, _name):
        if record.event.event_id == "E-2":
            raise LookupError("no route")
        return ["a"]

    outbox = kit.open(route=refuse_second)
    with pytest.raises(LookupError, match="no route"):
        kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    assert outbox.read(meta.load).result().document is None
    assert rows(kit) == []
    assert [record.sequence for record in kit.commit(outbox, kit.event("E-3"))] == [1]


def test_an_answer_in_doubt_is_not_stored_as_the_last_good_one(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event(), is_settled=False)
    assert outbox.read(meta.load).result().last_good_at is None
    outbox.write(meta.save_liveness, last_good_at=kit.time, boot_id="boot-2").result()
    assert (outbox.read(meta.load).result().last_good_at, outbox.read(meta.load).result().boot_id) == (
        kit.time,
        "boot-2",
    )


def test_a_restart_gives_back_everything(kit):
    outbox = kit.open()
    outbox.identify(VmIdentity(name="vm_0", vm_id="ID-0")).result()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    kit.settle(outbox, "a", 1)
    before = (
        outbox.read(meta.load).result(),
        kit.totals(outbox),
        outbox.read(deliveries.due, "b", limit=9).result(),
    )
    outbox.close()
    outbox = kit.open()
    assert (
        outbox.read(meta.load).result(),
        kit.totals(outbox),
        outbox.read(deliveries.due, "b", limit=9).result(),
    ) == before
    assert kit.due(outbox, "a") == [2]


# Sequences, ids, keys.


def test_a_sequence_is_never_used_twice_whatever_was_deleted(kit):
    outbox = kit.open(keep_delivered_seconds=10)
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    for sink in "ab":
        kit.settle(outbox, sink, 1, 2)
    kit.commit(outbox, document=Document(), incarnation=2)
    kit.wait(11)
    assert outbox.clean().result() == 2
    outbox.close()
    outbox = kit.open()
    assert outbox.records.last_sequence == 2
    assert [record.sequence for record in kit.commit(outbox, kit.event("E-3"))] == [3]


def test_ids_and_keys_are_made_as_the_record_says(kit):
    outbox = kit.open()
    outbox.identify(VmIdentity(name="vm_0", vm_id="AB-1")).result()
    event = kit.event(resources=("vm_1", "vm_0"))
    (record,) = kit.commit(outbox, event, incarnation=3)
    expected = record_id(
        vm_key="ab-1", event_key="E-1", transition=Transition.SCHEDULED, incarnation=3, event=event, repeat=0
    )
    assert record.id == expected
    assert record.transition_key == transition_key("E-1", Transition.SCHEDULED, event)
    assert (record.affects_this_vm, record.vm.vm_id) == (True, "AB-1")


def test_the_same_change_again_is_a_repeat_with_an_id_and_a_key_of_its_own(kit):
    outbox = kit.open()
    again = [kit.commit(outbox, kit.event())[0] for _ in range(3)]
    for repeat, record in enumerate(again):
        assert record.id == record_id(
            vm_key="",
            event_key="E-1",
            transition=Transition.SCHEDULED,
            incarnation=1,
            event=kit.event(),
            repeat=repeat,
        )
        assert record.transition_key == transition_key("E-1", Transition.SCHEDULED, kit.event(), repeat=repeat)


def test_a_repeat_never_takes_an_id_that_is_still_held(kit):
    outbox = kit.open(keep_delivered_seconds=10)
    first, second = (kit.commit(outbox, kit.event(), document=Document())[0] for _ in range(2))
    for sink in "ab":
        kit.settle(outbox, sink, first.sequence)
    kit.wait(11)
    assert outbox.clean().result() == 1
    third = kit.commit(outbox, kit.event())[0]
    assert len({first.id, second.id, third.id}) == 3
    assert len({first.transition_key, second.transition_key, third.transition_key}) == 3


def test_heartbeats_are_like_no_other_record(kit):
    outbox = kit.open()
    beats = [outbox.write(outbox.records.append_heartbeat, incarnation=4).result()[0] for _ in range(2)]
    assert [beat.transition for beat in beats] == [Transition.HEARTBEAT] * 2
    assert [beat.event for beat in beats] == [None, None]
    assert len({beat.id for beat in beats}) == len({beat.event_key for beat in beats}) == 2


# Sinks that come and go.


def test_a_sink_seen_for_the_first_time_gets_the_last_record_of_each_active_event(kit):
    outbox = kit.open(sinks=("a",))
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"), kit.event("E-3", status="Completed"))
    kit.commit(
        outbox,
        kit.event("E-1", status="Started"),
        transition="started",
        document=Document(events=(kit.event("E-1", status="Started"), kit.event("E-2"), kit.event("E-3", "Completed"))),
    )
    outbox.write(outbox.records.configure, lambda _record, _name: ["a", "new"], ["a", "new"], labels={}).result()
    assert kit.due(outbox, "new") == [2, 4]
    assert kit.due(outbox, "a") == [1, 2, 3, 4]
    outbox.write(outbox.records.configure, lambda _record, _name: ["a", "new"], ["a", "new"], labels={}).result()
    assert kit.due(outbox, "new") == [2, 4]


def test_a_sink_seen_for_the_first_time_is_told_how_an_approved_event_stands(kit):
    outbox = kit.open(sinks=("a",), keep_delivered_seconds=60)
    kit.commit(outbox, kit.event("E-1"))
    approval = Approval(source="cli", result="sent")
    outcome = ApprovalRecord(transition=Transition.APPROVED, event=kit.event("E-1"), approval=approval)
    outbox.write(outbox.records.append_outcomes, [outcome], incarnation=1).result()
    kit.settle(outbox, "a", 1, 2)
    kit.wait(3600)
    outbox.clean().result()
    outbox.write(outbox.records.configure, lambda _record, _name: ["a", "new"], ["a", "new"], labels={}).result()
    assert kit.due(outbox, "new") == [1, 2]


def test_a_new_sink_gets_only_what_it_wants_by_the_name_that_is_stored(kit):
    outbox = kit.open(sinks=("a",))
    outbox.identify(VmIdentity(name="vm_0", vm_id="1")).result()
    kit.commit(outbox, kit.event("E-1", resources=("vm_0",)), kit.event("E-2", resources=("vm_9",)))
    outbox.close()
    outbox = kit.open(sinks=())
    outbox.write(outbox.records.configure, Router([SinkConfig(name="mine")]), ["mine"], labels={}).result()
    assert kit.due(outbox, "mine") == [1]


def test_rows_of_a_sink_that_is_no_longer_configured_stay(kit):
    kit.commit(kit.open(), kit.event())
    kit.close()
    outbox = kit.open(sinks=("a",))
    kit.commit(outbox, kit.event("E-2"))
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([1, 2], [1])
    assert kit.totals(outbox)["b"]["pending"] == 1


def test_labels_of_the_configuration_are_in_later_records(kit):
    outbox = kit.open()
    outbox.write(outbox.records.configure, lambda _record, _name: ["a"], ["a"], labels={"team": "payments"}).result()
    assert kit.commit(outbox, kit.event())[0].labels == {"team": "payments"}


# Waiting for the identity.


def test_records_wait_without_sinks_until_the_identity_is_known(kit):
    outbox = kit.open(sinks=())
    outbox.write(outbox.records.configure, Router([SinkConfig(name="mine")]), ["mine"], labels={}).result()
    outbox.records.await_identity()
    mine, other = kit.event("E-1", resources=("vm_0",)), kit.event("E-2", resources=("vm_9",))
    kit.commit(outbox, mine, other, mine)
    assert kit.due(outbox, "mine") == []
    vm = VmIdentity(name="vm_0", vm_id="AB")
    assert outbox.identify(vm).result() is False
    owed = outbox.read(deliveries.due, "mine", limit=9).result()
    assert [(row.record.sequence, row.record.affects_this_vm, row.record.vm) for row in owed] == [
        (1, True, vm),
        (3, True, vm),
    ]
    ids = [
        record_id(vm_key="ab", event_key="E-1", transition=Transition.SCHEDULED, incarnation=1, event=mine, repeat=n)
        for n in range(2)
    ]
    assert [row.record.id for row in owed] == ids
    (again,) = kit.commit(outbox, mine)
    assert again.id not in ids


def test_records_are_sent_without_the_identity_when_it_does_not_come(kit):
    outbox = kit.open()
    outbox.records.await_identity()
    (record,) = kit.commit(outbox, kit.event())
    outbox.write(outbox.records.stop_waiting).result()
    (owed,) = outbox.read(deliveries.due, "a", limit=9).result()
    assert owed.record == record
    assert kit.commit(outbox, kit.event("E-2"))[0].vm == VmIdentity()
    assert kit.due(outbox) == [1, 2]


@pytest.mark.parametrize("ending", ["identify", "stop_waiting"])
@pytest.mark.parametrize("is_configured_first", [True, False])
def test_records_that_waited_when_the_agent_died_are_sent_by_the_next_one(kit, ending, is_configured_first):
    outbox = kit.open()
    outbox.records.await_identity()
    kit.commit(outbox, kit.event())
    outbox.close()
    outbox = kit.open(sinks=("a", "b") if is_configured_first else ())
    assert kit.due(outbox) == []
    if ending == "identify":
        outbox.identify(VmIdentity(name="vm_0", vm_id="AB")).result()
    else:
        outbox.write(outbox.records.stop_waiting).result()
    if not is_configured_first:
        outbox.write(outbox.records.configure, lambda _record, _name: ["a"], ["a"], labels={}).result()
    (owed,) = outbox.read(deliveries.due, "a", limit=9).result()
    assert owed.record.vm.name == ("vm_0" if ending == "identify" else None)


def test_a_sink_added_meanwhile_gets_what_waits_once_and_complete(kit):
    outbox = kit.open(sinks=("a",))
    outbox.records.await_identity()
    kit.commit(outbox, kit.event())
    outbox.close()
    outbox = kit.open(sinks=("a", "new"))
    outbox.identify(VmIdentity(name="vm_0", vm_id="AB")).result()
    (owed,) = outbox.read(deliveries.due, "new", limit=9).result()
    assert owed.record.vm.vm_id == "AB"


# Another machine's outbox.


def test_an_outbox_that_came_with_an_image_is_set_aside_and_said(kit, caplog):
    outbox = kit.open()
    outbox.identify(VmIdentity(name="golden", vm_id="GOLDEN")).result()
    kit.commit(outbox, kit.event())
    old_stream = outbox.read(meta.load).result().stream_id
    outbox.close()

    outbox = kit.open()
    stale = kit.observation(outbox, kit.event("E-2"))
    assert outbox.identify(VmIdentity(name="clone", vm_id="clone")).result() is True
    (aside,) = (path for path in kit.directory.iterdir() if re.fullmatch(r"outbox\.db\.other-vm-[^-]+Z", path.name))
    assert aside.stat().st_size > 0
    assert "vmId golden" in caplog.records[-1].why
    state = outbox.read(meta.load).result()
    assert (state.document, state.vm.vm_id) == (None, "clone")
    assert state.stream_id != old_stream
    assert kit.totals(outbox).keys() == {"a", "b"}
    with pytest.raises(StreamChanged):
        outbox.write(outbox.records.append_observation, stale).result()
    (record,) = kit.commit(outbox, kit.event("E-2"))
    assert (record.sequence, record.stream_id) == (1, state.stream_id)
    assert kit.due(outbox) == [1]


def test_the_old_files_go_together_when_an_outbox_is_set_aside(kit):
    outbox = kit.open()
    outbox.identify(VmIdentity(vm_id="golden")).result()
    assert outbox.identify(VmIdentity(vm_id="clone")).result() is True
    names = sorted(path.name for path in kit.directory.iterdir() if ".other-vm-" in path.name)
    assert [re.sub(r".*Z", "", name) for name in names] == ["", "-shm", "-wal"]


@pytest.mark.parametrize("vm_id", ["GOLDEN", None])
def test_an_outbox_stays_when_nothing_speaks_against_it(kit, vm_id):
    outbox = kit.open()
    outbox.identify(VmIdentity(name="vm_0", vm_id="golden")).result()
    kit.commit(outbox, kit.event())
    assert outbox.identify(VmIdentity(name="vm_1", vm_id=vm_id)).result() is False
    assert kit.due(outbox) == [1]


# Bounds.


def test_delivered_records_go_when_their_time_is_over_but_for_the_last_of_an_active_event(kit):
    outbox = kit.open(sinks=("a",), keep_delivered_seconds=100)
    active = Document(events=(kit.event("E-1"),))
    kit.commit(outbox, kit.event("E-1"), document=active)
    kit.commit(outbox, kit.event("E-1", description="new"), transition="updated", document=active)
    kit.commit(outbox, kit.event("E-2"), document=active)
    kit.commit(outbox, kit.event("E-3"), document=active)
    kit.settle(outbox, "a", 1, 2, 3)
    kit.wait(99)
    assert outbox.clean().result() == 0
    kit.wait(2)
    assert outbox.clean().result() == 2
    assert [row[1] for row in rows(kit)] == [2, 4]
    assert kit.totals(outbox)["a"]["delivered"] == 3
    assert_totals_hold(outbox, kit)


def test_when_full_delivered_goes_before_parked_and_parked_before_the_oldest_pending(kit, caplog):
    outbox = kit.open(sinks=("a",), max_bytes=1_000_000)
    kit.fill(outbox, 300, size=1000)
    kit.settle(outbox, "a", *range(101, 151))
    kit.settle(outbox, "a", *range(151, 201), state="parked")
    steps = []
    for _ in range(70):
        kit.fill(outbox, 10, size=1000)
        left = Counter("new" if sequence > 300 else state for _, sequence, state in rows(kit))
        steps.append((left["delivered"], left["parked"], left["pending"]))
    order = [step for number, step in enumerate(steps) if number == 0 or step != steps[number - 1]]
    for delivered, parked, pending in order:
        assert parked == 50 or delivered == 0
        assert pending == 200 or parked == delivered == 0
    assert order[-1][0] == order[-1][1] == 0
    totals = kit.totals(outbox)["a"]
    assert totals["evicted"] > 50
    assert_totals_hold(outbox, kit)
    assert "evicted undelivered" in caplog.text


def test_the_files_stay_within_the_bound(kit):
    outbox = kit.open(max_bytes=2_000_000)
    for _ in range(20):
        kit.fill(outbox, 200, size=2000)
        used = sum((kit.directory / f"outbox.db{suffix}").stat().st_size for suffix in ("", "-wal"))
        # The -wal holds what was written since the last checkpoint, of one transaction at least.
        assert used < 2_000_000 + 8_000_000
    assert (kit.directory / "outbox.db").stat().st_size < 2_000_000 * 1.5
    assert_totals_hold(outbox, kit)


def test_what_just_came_outlives_what_is_old(kit):
    outbox = kit.open(max_bytes=500_000)
    kit.fill(outbox, 2000, size=500)
    due = kit.due(outbox)
    assert due == list(range(due[0], 2001))
    assert due[0] > 1000


def test_a_file_of_a_newer_version_is_refused_with_a_sentence(kit):
    kit.open().close()
    connection = sqlite3.connect(kit.directory / "outbox.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(OutboxError, match=r"newer version \(schema 99, this one knows 1\)\. Run that version"):
        kit.open()
    assert [path.name for path in kit.directory.glob("outbox.db.*")] == []


def test_a_sink_is_told_when_its_pending_record_becomes_urgent_by_one_that_it_does_not_get(kit):
    outbox = kit.open(sinks=("a",), route=lambda record, _name: ["a"] if record.transition == "scheduled" else [])
    kit.commit(outbox, kit.event())
    told = []
    outbox.on_added = lambda: told.append(True)
    kit.commit(outbox, kit.event("E-2"), transition="updated")
    assert told == []
    kit.commit(outbox, kit.event(event_type="Preempt"), transition="updated")
    assert told == [True]


def test_sound_outbox_whose_checkpoint_was_stopped_is_not_set_aside_while_there_is_no_descriptor(kit):
    outbox = kit.open()
    kit.fill(outbox, 100, size=2000)
    file = kit.directory / "outbox.db"
    wal = Path(f"{file}-wal").read_bytes()
    page_bytes = int.from_bytes(wal[8:12], "big")
    frames = [wal[at : at + 24 + page_bytes] for at in range(32, len(wal), 24 + page_bytes)]
    first_page = [frame[24:] for frame in frames if frame[:4] == b"\0\0\0\1"][-1]
    with file.open("r+b") as database:  # as far as the checkpoint came: the file says it is longer than it is
        database.write(first_page)
    assert file.stat().st_size < int.from_bytes(first_page[28:32], "big") * page_bytes
    with no_descriptors():
        for _ in range(3):
            outbox.tend().result(60)
    assert (outbox.set_aside_count, outbox.in_memory) == (0, False)
    assert len(kit.due(outbox)) == 100


def test_all_is_committed_once_what_was_handed_in_is_done_and_not_before(kit):
    outbox, release = kit.open(), threading.Event()
    outbox.write(lambda _connection: release.wait(20))
    assert not outbox.close(0.0)
    assert not outbox.is_committed
    release.set()
    assert outbox.close(20)
    assert outbox.is_committed
