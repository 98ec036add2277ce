"""From a decision to Azure: what is written when, what is tried again, and what a crash leaves behind."""

import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import msgspec
import pytest
from approver_kit import ApproverKit
from least_time import least, least_seconds

from bridge.approval.digest import digest
from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.errors import ImdsStatus, ImdsUnreachable, OutboxReadOnly
from bridge.outbox import approvals
from bridge.outbox.approvals import cli_decision
from bridge.outbox.reader import OutboxFile

ANNE, BORIS = "anne", "boris"


def configure(kit, **options):
    kit.settings = ApprovalSettings(remote=kit.settings.remote, **options)
    kit.restart()


def consents(kit):
    return list(kit.outbox.read(approvals.read_state).result().approvals.values())


def test_a_decision_is_kept_before_anything_else_happens(kit):
    kit.approver.receive([kit.token(kit.event())])
    assert [each.state for each in kit.outbox.read(approvals.read_state).result().decisions] == ["new"]
    assert kit.imds.posts == []


def test_a_decision_kept_before_a_crash_is_followed_after_it(kit):
    kit.approver.receive([kit.token(kit.event())])
    kit.restart()
    kit.see(kit.event())
    kit.turn()
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_nothing_is_approved_without_an_answer_of_the_last_three_seconds(kit):
    kit.see(kit.event())
    kit.wait(3.1)
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == []
    assert kit.turn() <= 1.0
    kit.see(kit.event())
    kit.turn()
    assert kit.imds.posts == [["E-1"]]


def test_a_clock_that_jumps_makes_an_answer_old(kit):
    kit.see(kit.event())
    kit.wall_jump_seconds = 10.0
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == []


def test_several_decisions_at_once_go_in_one_request(kit):
    events = [kit.event(f"E-{number}") for number in range(5)]
    kit.see(*events)
    kit.offer(*(kit.token(event) for event in events))
    assert kit.imds.posts == [[event.event_id for event in events]]
    assert kit.outcomes == [("approved", "accepted")] * 5


def test_an_event_that_azure_does_not_know_does_not_keep_the_others_back(kit):
    events = [kit.event(f"E-{number}") for number in range(3)]
    kit.imds.refuses = {"E-1"}
    kit.see(*events)
    kit.offer(*(kit.token(event) for event in events))
    assert sorted(kit.outcomes) == [("approval_failed", "rejected"), ("approved", "accepted"), ("approved", "accepted")]


def test_an_approval_that_azure_does_not_take_is_tried_again_and_told_at_first_and_at_the_end(kit):
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(60, kit.event())
    assert kit.outcomes == [("approval_failed", "rejected")]
    assert len(kit.imds.posts) > 3
    kit.go(1)
    assert kit.outcomes == [("approval_failed", "rejected"), ("approval_failed", "gave_up")]
    assert kit.records[-1].approval.http_status == 500
    kit.go(60)
    assert len(kit.outcomes) == 2


def test_an_approval_that_azure_takes_at_last_is_approved(kit):
    kit.imds.answer = ImdsStatus("Server error", status=503)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(10, kit.event())
    kit.imds.answer = None
    kit.go(40, kit.event())
    assert kit.outcomes == [("approval_failed", "rejected"), ("approved", "accepted")]
    count = len(kit.imds.posts)
    kit.go(60, kit.event())
    assert len(kit.imds.posts) == count


def test_no_answer_is_neither_yes_nor_no_and_is_tried_again_after_a_new_document(kit):
    kit.imds.answer = ImdsUnreachable("cut")
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    assert kit.outcomes == []
    kit.wait(2)
    kit.turn()
    assert len(kit.imds.posts) == 1  # no document has been seen since
    kit.imds.answer = None
    kit.see(kit.event())
    kit.turn()
    assert len(kit.imds.posts) == 2
    assert kit.outcomes == [("approved", "accepted")]


def test_an_event_that_started_after_a_post_without_an_answer_is_not_said_to_be_approved(kit):
    kit.imds.answer = ImdsUnreachable("cut")
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(1, kit.event(event_status="Started"))
    assert kit.outcomes == [("approval_failed", "unanswered")]
    assert "may have taken it" in kit.records[-1].approval.reason


def test_a_crash_between_the_post_and_its_record_posts_the_same_again(kit):
    kit.imds.on_post = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    kit.see(kit.event())
    with pytest.raises(KeyboardInterrupt):
        kit.offer(kit.token(kit.event()))
    kit.imds.on_post = None
    kit.restart()
    assert kit.approver.approved == {"E-1"}
    kit.see(kit.event())
    kit.turn()
    assert kit.imds.posts == [["E-1"], ["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_a_hold_withdraws_what_was_not_posted(kit):
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.imds.answer = None
    kit.offer(kit.token(kit.event(), "hold", kid="k2", approver=BORIS, after=1))
    count = len(kit.imds.posts)
    kit.go(60, kit.event())
    assert len(kit.imds.posts) == count
    assert kit.outcomes[-1] == ("approval_refused", "superseded")


def test_a_hold_that_comes_while_the_post_is_being_counted_is_in_time(kit):
    kit.see(kit.event())
    kit.approver.receive([kit.token(kit.event())])
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.turn()
    kit.wait(40)
    kit.see(kit.event())
    # kept, and not yet looked at: no request may go out beside it
    kit.approver.receive([kit.token(kit.event(), "hold", kid="k2", approver=BORIS)])
    state = kit.outbox.read(approvals.read_state).result()
    consents = list(state.approvals.values())
    ready = kit.outbox.write(approvals.begin_attempt, state.stream_id, consents, kit.now().timestamp()).result()
    assert ready == []


def test_a_change_of_the_event_ends_what_was_wanted(kit):
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.imds.answer = None
    kit.go(60, kit.event(resources=("vm_0", "vm_1", "vm_2")))
    assert len(kit.imds.posts) == 1
    assert kit.outcomes[-1] == ("approval_failed", "gave_up")


def test_a_second_approval_of_an_approved_event_is_told_and_not_posted(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.offer(kit.token(kit.event(), kid="k2", approver=BORIS))
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted"), ("approved", "already_approved")]


def test_an_event_that_azure_forgot_is_approved_again_by_a_decision_made_after_the_first(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(90, kit.event())
    assert kit.imds.posts == [["E-1"]]
    kit.offer(kit.token(kit.event(), kid="k2", approver=BORIS))
    assert kit.imds.posts == [["E-1"]] * 2
    kit.go(90, kit.event())
    assert kit.imds.posts == [["E-1"]] * 2
    assert kit.outcomes == [("approved", "accepted")] * 2
    assert "told again" in kit.records[-1].approval.reason
    gauge = "scheduled_events_bridge_approved_waiting_seconds"
    assert kit.metrics.registry.get_sample_value(gauge) == pytest.approx(180)  # since the first


def test_an_event_approved_before_stays_approved_whatever_becomes_of_the_second_time(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(5, kit.event())
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.offer(kit.token(kit.event()))
    kit.offer(kit.token(kit.event(), "hold", after=1))
    assert kit.approver.approved == {"E-1"}
    kit.restart()
    assert kit.approver.approved == {"E-1"}


def test_the_second_time_asks_for_as_many_approvers_as_the_first(kit):
    kit.trust(("k1", ANNE), ("k2", BORIS), required=2)
    kit.restart()
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()), kit.token(kit.event(), kid="k2", approver=BORIS))
    kit.go(90, kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(5, kit.event())
    assert kit.imds.posts == [["E-1"]]
    kit.offer(kit.token(kit.event(), kid="k2", approver=BORIS))
    assert kit.imds.posts == [["E-1"]] * 2


@pytest.mark.parametrize(
    ("not_before_seconds", "valid_seconds", "ends_after_seconds"),
    [(7200, 3600, 7200 + 3600), (600, 6 * 3600, 6 * 3600 + 60), (None, 7200, 7200 + 60)],
    ids=["an hour after NotBefore", "exp, which is later", "exp, without NotBefore"],
)
def test_an_accepted_approval_ends_at_exp_or_an_hour_after_not_before_whichever_is_later(
    kit, not_before_seconds, valid_seconds, ends_after_seconds
):
    not_before = None if not_before_seconds is None else kit.now() + timedelta(seconds=not_before_seconds)
    event = kit.event(not_before=not_before)
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.see(event)
    kit.offer(kit.token(event, valid_seconds=valid_seconds))
    kit.wait(ends_after_seconds - 30)
    kit.go(1, event)
    assert len(kit.imds.posts) == 2
    kit.imds.answer = None
    kit.wait(30)
    kit.go(60, event)
    assert len(kit.imds.posts) == 2
    assert kit.outcomes == [("approval_failed", "rejected"), ("approval_failed", "gave_up")]
    assert "NotBefore" in kit.records[-1].approval.reason


def test_an_approval_that_comes_before_its_time_is_followed_when_the_time_comes(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), after=300))
    kit.go(239, kit.event())
    assert kit.imds.posts == []
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approval_refused", "not_yet_valid"), ("approved", "accepted")]
    assert "looked at again" in kit.records[0].approval.reason


def test_a_hold_made_meanwhile_wins_over_an_approval_that_came_before_its_time(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), after=300))
    kit.offer(kit.token(kit.event(), "hold", after=301, kid="k2", approver=BORIS))
    kit.go(320, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes[-1] == ("approval_refused", "superseded")


def test_a_dry_run_does_all_but_the_post(kit):
    configure(kit, dry_run=True)
    kit.go(1, kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approved", "dry_run")]
    assert kit.records[-1].approval.http_status is None
    assert kit.approver.approved == frozenset()


def test_after_a_dry_run_a_new_decision_is_followed(kit):
    configure(kit, dry_run=True)
    kit.go(1, kit.event())
    kit.offer(kit.token(kit.event()))
    configure(kit, dry_run=False)
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == [["E-1"]]


def test_the_file_stops_everything_at_once_and_its_removal_goes_on(kit):
    kit.see(kit.event())
    switch = kit.state / "approvals.disabled"
    switch.touch()
    kit.offer(kit.token(kit.event()))
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "disabled"), ("approval_failed", "disabled")]
    switch.unlink()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes[-1] == ("approved", "accepted")


def test_an_approval_that_the_file_stopped_until_the_event_began_is_refused(kit):
    kit.see(kit.event())
    (kit.state / "approvals.disabled").symlink_to("nowhere")
    kit.offer(kit.token(kit.event()))
    kit.go(1, kit.event(event_status="Started"))
    assert kit.imds.posts == []
    assert kit.outcomes[-1] == ("approval_refused", "event_not_scheduled")


def test_what_was_posted_and_stays_scheduled_is_visible(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(90, kit.event())
    gauge = "scheduled_events_bridge_approved_waiting_seconds"
    assert kit.metrics.registry.get_sample_value(gauge) == pytest.approx(90)
    labels = {"source": "portal", "result": "accepted"}
    assert kit.metrics.registry.get_sample_value("scheduled_events_bridge_approvals_total", labels) == 1
    kit.restart()
    kit.go(10, kit.event())
    assert kit.metrics.registry.get_sample_value(gauge) == pytest.approx(100)
    kit.go(1, kit.event(event_status="Started"))
    assert kit.metrics.registry.get_sample_value(gauge) == 0


def test_a_decision_beside_the_agent_goes_the_same_way(kit):
    kit.see(kit.event())
    decision = cli_decision(
        approver="root", decision_id="d-1", event=kit.event(), event_digest=digest(kit.event()), valid_seconds=60
    )
    # the kit's clock is not the system's
    moment = kit.now().timestamp()
    decision = msgspec.structs.replace(decision, issued_at=int(moment * 1e6), expires_at=moment + 60)
    with OutboxFile(kit.state) as beside:
        beside.decide(decision)
        kit.turn()
        assert beside.decision(decision).outcome == "accepted"
    assert kit.imds.posts == [["E-1"]]
    (approved,) = (record for record in kit.records if record.approval is not None)
    assert (approved.approval.source, approved.approval.approvers) == ("cli", ("root",))


def test_a_database_that_was_lost_takes_no_decision_from_before(kit):
    kit.see(kit.event())
    token = kit.token(kit.event())
    kit.offer(token)
    kit.close()
    (kit.state / "outbox.db").write_bytes(b"no database at all" * 1000)
    for name in ("outbox.db-wal", "outbox.db-shm"):
        (kit.state / name).unlink(missing_ok=True)
    kit.wait(1)
    kit.start()
    kit.see(kit.event())
    kit.offer(token)
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes[-1] == ("approval_refused", "issued_before_this_outbox")


def test_a_database_deleted_under_the_agent_is_made_again_and_knows_the_decision_from_before(kit):
    kit.see(kit.event())
    token = kit.token(kit.event())
    kit.offer(token)
    kit.wait(1)
    (kit.state / "outbox.db").unlink()
    kit.outbox.tend().result()
    kit.see(kit.event())
    kit.offer(token)
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_the_reason_of_a_refusal_is_that_of_the_database_as_it_is_now(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    old = kit.token(kit.event(), valid_seconds=10)
    kit.wait(100)
    kit.close()
    (kit.state / "outbox.db").write_bytes(b"no database at all" * 1000)
    kit.start()
    made = kit.now().isoformat()
    kit.see(kit.event())
    kit.offer(old)
    kit.go(2, kit.event())
    refused = kit.records[-1].approval
    assert refused.result == "issued_before_this_outbox"
    assert f"before the outbox was made at {made}" in refused.reason


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_a_clock_that_was_a_day_ahead_at_the_first_start_refuses_nothing_once_it_is_right(tmp_path, restarts):
    kit = ApproverKit(tmp_path)
    kit.trust(("k1", ANNE))
    kit.wall_jump_seconds = 86_400.0
    kit.start()
    try:
        kit.wait(10)
        kit.see(kit.event())
        early = kit.token(kit.event(), after=-86_400)
        kit.offer(early)
        assert kit.outcomes == [("approval_refused", "issued_before_this_outbox")]
        kit.wall_jump_seconds = 0.0
        if restarts:
            kit.restart()
        kit.go(5, kit.event())
        kit.offer(kit.token(kit.event()) if restarts else early)
        kit.go(2, kit.event())
        assert kit.imds.posts == [["E-1"]]
    finally:
        kit.close()


def test_what_was_issued_before_a_database_that_a_wrong_clock_made_stays_refused(tmp_path):
    kit = ApproverKit(tmp_path)
    kit.trust(("k1", ANNE))
    kit.wall_jump_seconds = 86_400.0
    kit.start()
    try:
        kit.wait(10)
        kit.wall_jump_seconds = 0.0
        kit.wait(10)
        kit.see(kit.event())
        kit.offer(kit.token(kit.event(), after=-21))
        kit.go(2, kit.event())
        assert kit.imds.posts == []
        assert kit.outcomes == [("approval_refused", "issued_before_this_outbox")]
    finally:
        kit.close()


@contextmanager
def posting(kit, event_id):
    """Have the approver post that event, and hold it there until the yielded event is set or the block ends."""
    reached, release = threading.Event(), threading.Event()
    kit.imds.on_post = lambda: (reached.set(), release.wait(20))
    kit.see(kit.event(event_id))
    kit.approver.receive([kit.token(kit.event(event_id))])
    turn = threading.Thread(target=kit.turn)
    turn.start()
    try:
        assert reached.wait(20)
        yield release
    finally:
        release.set()
        turn.join()


def test_the_poll_waits_for_a_post_about_its_event_and_no_longer_than_a_second(kit):
    with posting(kit, "E-1") as release:
        assert least_seconds(lambda: kit.approver.wait_for_submission(["E-2"]), below=0.5) < 0.5
        assert 0.9 <= least_seconds(lambda: kit.approver.wait_for_submission(["E-1"]), below=1.6) < 1.6
        release.set()
    event_ids = (f"E-{number}" for number in count(3))

    def seconds_until_it_is_posted():
        kit.wait(10)
        with posting(kit, next(event_ids)) as release:
            threading.Timer(0.2, release.set).start()
            started = time.monotonic()
            kit.approver.wait_for_submission([kit.document.events[0].event_id])
            seconds = time.monotonic() - started
            # whoever writes now comes after the outcome
            (written,) = kit.outbox.write(kit.outbox.records.append_heartbeat, incarnation=1).result()
        if seconds < 0.9:
            assert kit.records[-2].approval.result == "accepted"
            assert kit.records[-1].sequence == written.sequence
        return seconds

    assert least(seconds_until_it_is_posted, below=0.9) < 0.9


def test_a_failure_in_the_approver_is_said_and_does_not_end_it(kit, caplog):
    kit.see(kit.event())
    kit.imds.answer = RuntimeError("a bug")
    kit.approver.start()
    kit.approver.receive([kit.token(kit.event())])
    deadline = time.monotonic() + 20
    while "a bug" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "it goes on" in caplog.text
    kit.imds.answer = None
    while not any(result == "accepted" for _, result in kit.outcomes) and time.monotonic() < deadline:
        kit.see(kit.event())
        time.sleep(0.02)
    assert kit.outcomes == [("approved", "accepted")]


def leave_disk(kit):
    """Have the outbox go on in memory, as it does when its disk refuses."""
    kit.outbox.exclusive(lambda store: store._switch_to_memory("a test")).result()


def test_nothing_is_approved_while_the_outbox_lives_in_memory_and_all_of_it_after(kit):
    kit.see(kit.event(), kit.event("E-2"))
    kit.approver.receive([kit.token(kit.event())])
    leave_disk(kit)
    with pytest.raises(OutboxReadOnly):
        kit.turn()
    kit.approver.receive([kit.token(kit.event("E-2"))])
    with pytest.raises(OutboxReadOnly):
        kit.turn()
    assert kit.imds.posts == []
    kit.outbox.tend().result()
    kit.go(1, kit.event(), kit.event("E-2"))
    assert sorted(event_id for post in kit.imds.posts for event_id in post) == ["E-1", "E-2"]


def test_what_was_followed_before_the_disk_refused_is_known_after(kit):
    kit.see(kit.event())
    token = kit.token(kit.event())
    kit.offer(token)
    leave_disk(kit)
    kit.approver.receive([token])
    kit.outbox.tend().result()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_a_disk_that_refuses_during_the_post_leaves_the_approval_open(kit):
    kit.imds.on_post = lambda: leave_disk(kit)
    kit.see(kit.event())
    with pytest.raises(OutboxReadOnly):
        kit.offer(kit.token(kit.event()))
    kit.imds.on_post = None
    kit.outbox.tend().result()
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"], ["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_an_outbox_of_another_machine_approves_nothing_here(kit):
    kit.approver.receive([kit.token(kit.event())])
    kit.vm = kit.vm.__class__(name="vm_0", vm_id="another")
    kit.restart()
    kit.go(3, kit.event())
    assert kit.imds.posts == []


def test_for_one_approval_of_a_person_nothing_else_that_is_open_is_posted(kit):
    freeze = RuleSettings(name="freeze", action="approve", event_types=("Freeze",), act="each")
    kit.settings = msgspec.structs.replace(kit.settings, rules=(freeze,))
    kit.reload()
    kit.hear_portal()
    of_rule, of_portal, asked_for = kit.event(), *(kit.event(name, event_type="Reboot") for name in ("E-2", "E-3"))
    kit.imds.refuses = {"E-1", "E-2", "E-3"}
    kit.offer(kit.token(of_portal), kit.token(asked_for))
    kit.go(3, of_rule, of_portal, asked_for)
    assert {each for post in kit.imds.posts for each in post} == {"E-1", "E-2", "E-3"}
    kit.settings = msgspec.structs.replace(kit.settings, rules=())
    kit.on_request_only = True
    kit.imds.refuses = set()
    kit.imds.posts.clear()
    kit.restart()
    kit.go(60, of_rule, of_portal, asked_for)
    assert kit.imds.posts == []
    kit.approve_here(asked_for)
    kit.go(60, of_rule, of_portal, asked_for)
    assert kit.imds.posts == [["E-3"]]
    kit.on_request_only = False
    kit.restart()
    kit.go(60, of_rule, of_portal, asked_for)
    assert {each for post in kit.imds.posts for each in post} >= {"E-2", "E-3"}
