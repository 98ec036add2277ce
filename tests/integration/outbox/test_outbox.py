"""The outbox: due records, the effect of the limits, and the selection of files at a start."""

import os
import sqlite3
import threading
from contextlib import closing

import pytest
from outbox_kit import append, refuse_writes

from bridge.events.event import VmIdentity
from bridge.outbox import approvals, deliveries, retention
from bridge.outbox.database import generations, read_newest, read_records
from bridge.outbox.rows import DeliveryState

ME = VmIdentity(name="vm_0", vm_id="AAAA")
OTHER = VmIdentity(name="vm_1", vm_id="BBBB")


def test_error_that_quotes_a_lone_surrogate_is_saved(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    kit.settle(outbox, "a", 1, state="parked", error="HTTP 400: \ud800")
    kit.saved(outbox)
    assert kit.crash(outbox).read(deliveries.needed_records, "a", [DeliveryState.PARKED])[0].error == "HTTP 400: ?"


def test_saver_survives_every_error(kit, monkeypatch):
    outbox = kit.open()
    kit.saved(outbox)
    monkeypatch.setattr("bridge.outbox.database._Spec.encode", lambda *_: 1 / 0)
    kit.commit(outbox, kit.event(), save=False)
    assert not outbox.wait_saved(0.3)
    assert outbox.is_behind
    monkeypatch.undo()
    kit.saved(outbox)
    assert not outbox.is_behind


def test_outbox_that_stays_behind_uses_no_memory_for_history(kit, monkeypatch):
    monkeypatch.setattr("bridge.outbox.saver._MOST_UNSAVED", 50)
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    refuse_writes(monkeypatch)
    for sequence in range(2, 400):
        append(outbox, "heartbeat")
        kit.settle(outbox, "a", sequence)
        kit.settle(outbox, "b", sequence)
    outbox.wait_saved(2.5)
    assert outbox.saver._unsaved.tables == {}
    monkeypatch.undo()
    kit.saved(outbox)
    again = kit.crash(outbox)
    assert (kit.due(again), kit.totals(again)["a"]["accepted"]) == ([1], 399)


def test_invalid_value_in_meta_does_not_prevent_a_start(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    file = outbox.saver.file
    kit.settle(outbox, "a", 1)
    assert outbox.close()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE meta SET value = 'x' WHERE key = 'next_sequence'")
    assert kit.open().read(lambda state: state.next_sequence) == 1


# Due.


def test_record_is_due_when_it_is_saved(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    assert kit.due(outbox) == [1]
    assert outbox.seconds_to_due() == float("inf")


def test_record_is_due_after_half_a_second_on_a_failing_disk(kit, monkeypatch):
    outbox = kit.open()
    kit.saved(outbox)
    refuse_writes(monkeypatch)
    kit.commit(outbox, kit.event(), save=False)
    assert not outbox.wait_saved(0.3)
    assert kit.due(outbox) == []
    assert outbox.seconds_to_due() == 0.5
    kit.wait(0.6)
    assert kit.due(outbox) == [1]
    assert outbox.is_behind
    monkeypatch.undo()
    kit.saved(outbox)
    assert not outbox.is_behind


def test_urgent_event_overtakes_with_its_older_records(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("P-1", event_type="Reboot"), kit.event("E-2"))
    kit.commit(outbox, kit.event("P-1", event_type="Preempt"), transition="updated")
    assert kit.due(outbox) == [2, 4, 1, 3]


def test_newer_record_replaces_pending_records_of_a_current_state_sink(kit):
    outbox = kit.open(current_state_only=("a",))
    kit.commit(outbox, kit.event())
    kit.commit(outbox, kit.event(status="Started"), transition="started")
    kit.commit(outbox, kit.event(status="Started"), transition="completed")
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([3], [1, 2, 3])
    assert kit.totals(outbox)["a"]["expired"] == 2


def test_new_sink_receives_the_last_record_of_each_active_event(kit):
    outbox = kit.open(sinks=("a",))
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    kit.commit(outbox, kit.event("E-1", status="Started"), transition="started")
    kit.commit(outbox, kit.event("E-2"), transition="canceled")
    kit.settle(outbox, "a", 1, 2, 3, 4)
    kit.saved(outbox)
    again = kit.crash(outbox)
    assert kit.due(again, "b") == [3]


# Ids.


def test_repeated_transition_has_a_new_id_even_after_a_restart(kit):
    outbox = kit.open()
    first, second = (kit.commit(outbox, kit.event())[0] for _ in range(2))
    third = kit.commit(kit.crash(outbox), kit.event())[0]
    assert len({first.id, second.id, third.id}) == 3
    assert len({first.transition_key, second.transition_key, third.transition_key}) == 3


def test_record_that_was_not_saved_before_a_kill_has_the_same_id_again(kit, monkeypatch):
    outbox = kit.open()
    outbox.identify(ME)
    kit.saved(outbox)
    refuse_writes(monkeypatch)
    lost = kit.commit(outbox, kit.event(), save=False)[0]
    copy = kit.crash(outbox)
    monkeypatch.undo()
    again = kit.commit(copy, kit.event())[0]
    assert (again.id, again.transition_key) == (lost.id, lost.transition_key)
    assert again.stream_id > lost.stream_id


# Limits.


def test_limit_in_memory_evicts_parked_then_oldest_and_urgent_last(kit):
    outbox = kit.open(sinks=("a",), max_pending_bytes=20_000)
    kit.commit(outbox, kit.event("P-1", event_type="Preempt", description="x" * 3000))
    for number in range(3):
        kit.commit(outbox, kit.event(f"E-{number}", description="x" * 3000))
    kit.settle(outbox, "a", 3, state="parked")
    for number in range(3, 8):
        kit.commit(outbox, kit.event(f"E-{number}", description="x" * 3000))
    left = kit.due(outbox)
    assert left[0] == 1
    assert left[-1] == 9
    assert 2 not in left
    totals = kit.totals(outbox)["a"]
    assert totals["parked"] == 0
    assert totals["evicted"] + totals["pending"] == totals["accepted"] == 9


def test_newest_document_and_records_that_are_being_sent_are_not_evicted(kit):
    outbox = kit.open(sinks=("a",), max_pending_bytes=4_000)
    kit.commit(outbox, kit.event("E-0", description="x" * 3000))
    outbox.select("a", lambda rows: list(rows)[:1])
    kit.commit(outbox, kit.event("E-1", description="x" * 3000))
    kit.commit(outbox, kit.event("E-2", description="x" * 3000), kit.event("E-3", description="x" * 3000))
    assert kit.due(outbox) == [1, 3, 4]


def test_limit_of_the_files_removes_history_and_older_files_first(kit):
    outbox = kit.open(sinks=("a",), max_bytes=1_000_000)
    for round_number in range(60):
        added = kit.fill(outbox, 40, size=500)
        kit.settle(outbox, "a", *(record.sequence for record in added))
        for record in added:
            kit.commit(outbox, record.event, transition="completed", save=False)
        kit.settle(outbox, "a", *kit.due(outbox))
        kit.saved(outbox)
        kit.settle(outbox, "a", *kit.due(outbox))
        assert round_number == 0 or outbox.saver.used_bytes < 1_100_000
    assert kit.totals(outbox)["a"]["evicted"] == 0


# Files.


def test_delivered_record_becomes_history_after_its_event_ended(kit):
    outbox = kit.open(sinks=("a",))
    kit.commit(outbox, kit.event())
    kit.commit(outbox, kit.event(), transition="canceled")
    kit.settle(outbox, "a", 1, 2)
    kit.saved(outbox)
    assert outbox.read(lambda state: len(state.records.rows)) == 0
    assert [sequence for sequence, _ in read_records(outbox.saver.file, after=0, before=99)] == [2, 1]


def test_start_opens_the_newest_complete_file_and_keeps_two_others(kit):
    outbox = kit.open()
    kit.saved(outbox)
    for _ in range(4):
        os.truncate(outbox.saver.file, 0)
        kit.commit(outbox, kit.event())
    (kit.directory / "outbox-9.db").touch()
    again = kit.crash(outbox)
    assert kit.due(again) == [1, 2, 3, 4]
    os.truncate(again.saver.file, 0)
    kit.saved(again)
    assert again.saver.file.name == "outbox-10.db"
    assert len(generations(kit.directory)) == 3


def test_change_by_another_program_is_detected_despite_deleted_history(kit):
    overwritten = []

    def now():  # the saver asks for the time right before it deletes history
        files = list(kit.directory.glob("outbox-*.db"))
        if threading.current_thread().name == "saver" and files and not overwritten:
            overwritten.append(files[0].write_bytes(os.urandom(files[0].stat().st_size)))
        return kit.time

    kit.now = now
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    kit.saved(outbox)
    assert overwritten
    assert outbox.saver.file_changes == 1
    assert kit.due(kit.crash(outbox)) == [1]


@pytest.mark.parametrize("has_portal", [False, True])
def test_damaged_page_loses_only_its_rows(kit, has_portal, caplog):
    outbox = kit.open(sinks=("a",), has_portal=has_portal)
    kit.fill(outbox, 300, size=900)
    file = outbox.saver.file
    assert outbox.close(10)
    with closing(sqlite3.connect(file)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'decisions'").fetchone()
    with file.open("r+b") as raw:
        raw.seek((root - 1) * 1024)
        raw.write(os.urandom(1024))
        raw.seek(200 * 1024)
        raw.write(os.urandom(4096))
    again = kit.open(sinks=("a",), has_portal=has_portal)
    kit.saved(again)
    assert len(kit.due(again)) >= 280
    assert "damaged" in caplog.text
    assert again.saver.file.name == "outbox-2.db"
    assert (kit.directory / approvals.DISABLED_FILE).exists() is not has_portal
    totals = kit.totals(again)["a"]
    assert totals["accepted"] == totals["pending"] == len(kit.due(again))


def test_garbage_in_the_newest_file_starts_from_an_older_one(kit, caplog):
    outbox = kit.open(sinks=("a",))
    kit.commit(outbox, kit.event())
    outbox.close(10)
    (kit.directory / "outbox-2.db").write_bytes(os.urandom(8192))
    again = kit.open(sinks=("a",))
    kit.saved(again)
    assert kit.due(again) == [1]
    assert again.saver.file.name == "outbox-3.db"
    assert "outbox-2.db" in str([record.__dict__.get("unreadable") for record in caplog.records])


def test_file_of_a_development_version_is_left_in_place(kit):
    kit.directory.mkdir()
    with closing(sqlite3.connect(kit.directory / "outbox-1.db")) as connection:
        connection.execute("PRAGMA user_version = 7")
    outbox = kit.open()
    kit.saved(outbox)
    assert outbox.saver.file.name == "outbox-2.db"
    assert (kit.directory / "outbox-1.db").exists()


# Identity.


def test_stored_rows_of_an_untrusted_outbox_wait(kit):
    outbox = kit.open(boot_id="boot-1")
    outbox.identify(ME)
    kit.commit(outbox, kit.event())
    again = kit.open(boot_id="boot-2")
    assert (again.is_trusted, kit.due(again)) == (False, [])
    again.identify(ME)
    assert kit.due(again) == [1]


def test_outbox_of_another_machine_is_replaced_with_an_empty_one(kit):
    outbox = kit.open(boot_id="boot-1")
    outbox.identify(ME)
    kit.commit(outbox, kit.event())
    outbox.close(10)
    again = kit.open(boot_id="boot-2")
    stream_id = again.read(deliveries.totals).stream_id
    assert again.identify(OTHER)
    assert again.is_trusted
    assert again.read(lambda state: state.document) is None
    assert again.read(deliveries.totals).stream_id > stream_id
    kit.saved(again)
    assert kit.due(again) == kit.due(kit.crash(again, boot_id="boot-2")) == []


def test_no_save_mixes_the_files_of_two_machines(kit, monkeypatch):
    outbox = kit.open()
    outbox.identify(OTHER)
    kit.commit(outbox, kit.event())
    outbox = kit.crash(outbox, boot_id="boot-2", sinks=())
    kit.saved(outbox)
    found = []

    def wake(**_when):
        kit.saved(outbox)
        loaded = read_newest(kit.directory)
        found.append([row.key for row in loaded.rows["events"]])

    monkeypatch.setattr(outbox.saver, "wake", wake)
    assert outbox.identify(ME)
    assert found == [[]]


def test_events_and_their_counts_are_removed_after_seven_days(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    kit.commit(outbox, kit.event("E-1"), transition="canceled")
    kit.commit(outbox, kit.event("E-2"))
    kit.wait(8 * 86_400)
    outbox.change(retention.forget_old, kit.time.timestamp())
    assert list(outbox.read(lambda state: state.events.rows)) == ["E-2"]


def test_ending_lists_the_earlier_transitions_of_its_event(kit):
    outbox = kit.open()
    first = kit.commit(outbox, kit.event())[0]
    kit.commit(outbox, kit.event("E-2"))
    started = kit.commit(outbox, kit.event(status="Started"), transition="started")[0]
    assert (first.timeline, started.timeline) == (None, None)
    again = kit.crash(outbox)
    ending = kit.commit(again, kit.event(status="Started"), transition="completed")[0]
    assert [(each.transition, each.observed_at) for each in ending.timeline or ()] == [
        ("scheduled", first.observed_at),
        ("started", started.observed_at),
    ]


def test_timeline_of_an_event_that_keeps_changing_is_bounded(kit):
    outbox = kit.open()
    for number in range(150):
        kit.commit(outbox, kit.event(description=f"{number}"), transition="updated", save=False)
    ending = kit.commit(outbox, kit.event(), transition="canceled")[0]
    assert len(ending.timeline or ()) == 100
