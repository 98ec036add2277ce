"""The approver from a decision to the Azure request: order of writes, retries, and crashes."""

import threading
import time
from datetime import timedelta

import pytest
from approver_kit import BORIS
from waiting import until

from bridge.config.approval import ApprovalSettings
from bridge.errors import BridgeError, ImdsStatus, ImdsUnreachable
from bridge.events.record import Transition
from bridge.outbox import approvals


def configure(kit, **options):
    kit.settings = ApprovalSettings(remote=kit.settings.remote, **options)
    kit.restart()


def test_stored_decision_is_executed_after_a_crash(kit):
    kit.approver.receive([kit.token(kit.event())])
    kit.restart()
    kit.see(kit.event())
    kit.turn()
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_approval_requires_a_response_from_the_last_three_seconds(kit):
    kit.see(kit.event())
    kit.wait(3.1)
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == []
    assert kit.turn() <= 1.0
    kit.see(kit.event())
    kit.turn()
    assert kit.imds.posts == [["E-1"]]


def test_clock_jump_makes_a_response_too_old(kit):
    kit.see(kit.event())
    kit.wall_jump_seconds = 10.0
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == []


def test_rejected_request_is_retried_and_recorded_first_and_last(kit):
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


def test_request_without_a_response_is_retried(kit):
    kit.imds.answer = ImdsUnreachable("cut")
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    assert kit.outcomes == []
    kit.imds.answer = None
    kit.go(2, kit.event())
    assert kit.imds.requests == ["GET", "POST"] * 2
    assert kit.outcomes == [("approved", "accepted")]


def test_start_after_an_unanswered_request_is_not_recorded_as_approved(kit):
    kit.imds.answer = ImdsUnreachable("cut")
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(1, kit.event(event_status="Started"))
    assert kit.outcomes == [("approval_failed", "unanswered")]
    assert "may have accepted it" in kit.records[-1].approval.reason


def test_request_is_repeated_after_a_crash_before_its_record(kit):
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


def test_hold_withdraws_an_approval_that_was_not_sent(kit):
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.imds.answer = None
    kit.offer(kit.token(kit.event(), "hold", kid="k2", approver=BORIS, after=1))
    count = len(kit.imds.posts)
    kit.go(60, kit.event())
    assert len(kit.imds.posts) == count
    assert kit.outcomes[-1] == ("approval_refused", "superseded")


def test_hold_before_the_attempt_is_stored_prevents_the_request(kit):
    kit.see(kit.event())
    kit.approver.receive([kit.token(kit.event())])
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.turn()
    kit.wait(40)
    kit.see(kit.event())
    # The hold is stored and not evaluated yet. No request may be sent.
    kit.approver.receive([kit.token(kit.event(), "hold", kid="k2", approver=BORIS)])
    stream_id, (approval,), now = kit.approval_state.stream_id, kit.approvals, kit.now().timestamp()
    assert kit.outbox.change(approvals.begin_attempt, stream_id, approval, now=now) is None


def test_second_approval_of_an_approved_event_is_recorded_but_not_sent(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.offer(kit.token(kit.event(), kid="k2", approver=BORIS))
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted"), ("approved", "already_approved")]


@pytest.mark.parametrize(
    ("not_before_seconds", "valid_seconds", "ends_after_seconds"),
    [(7200, 3600, 7200), (600, 6 * 3600, 6 * 3600 + 60), (None, 7200, 7200 + 60)],
    ids=["NotBefore", "later exp", "exp without NotBefore"],
)
def test_accepted_approval_ends_at_exp_or_not_before_whichever_is_later(
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


def test_early_approval_is_executed_when_it_becomes_valid(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), after=300))
    kit.go(239, kit.event())
    assert kit.imds.posts == []
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approval_refused", "not_yet_valid"), ("approved", "accepted")]
    assert "checks the decision again" in kit.records[0].approval.reason


def test_dry_run_does_everything_except_the_request(kit):
    configure(kit, dry_run=True)
    kit.go(1, kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approved", "dry_run")]
    assert kit.records[-1].approval.http_status is None
    assert kit.approver.approved == frozenset()


def test_disable_file_stops_approvals_and_its_removal_resumes_them(kit):
    kit.see(kit.event())
    switch = kit.state / "approvals.disabled"
    switch.touch()
    kit.offer(kit.token(kit.event()))
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_failed", "disabled")]
    switch.unlink()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes[-1] == ("approved", "accepted")


def test_metric_reports_approved_events_that_remain_scheduled(kit):
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


def test_poll_waits_for_an_inflight_request_so_approved_precedes_started(kit):
    reached, release = threading.Event(), threading.Event()
    kit.imds.on_post = lambda: (reached.set(), release.wait(20))
    kit.see(kit.event())
    kit.approver.receive([kit.token(kit.event())])
    turn = threading.Thread(target=kit.turn)
    turn.start()
    assert reached.wait(20)
    began = time.monotonic()
    kit.approver.wait_for_submission()
    assert time.monotonic() - began >= 0.9
    threading.Timer(0.1, release.set).start()
    kit.approver.wait_for_submission()
    assert kit.outcomes == [("approved", "accepted")]
    turn.join()


def test_approver_logs_a_failure_and_continues(kit, caplog):
    kit.see(kit.event())
    kit.imds.answer = RuntimeError("a bug")
    kit.approver.start()
    kit.approver.receive([kit.token(kit.event())])
    until(lambda: "a bug" in caplog.text)
    assert "The approver failed and tries again." in caplog.text
    kit.imds.answer = None
    until(lambda: kit.see(kit.event()) or kit.outcomes)
    assert kit.outcomes == [("approved", "accepted")]


def test_approver_failure_with_varying_message_is_logged_once(kit, caplog):
    class Failure(BridgeError):
        count = 0

        def __str__(self):
            Failure.count += 1
            return f"failure {Failure.count}"

    kit.see(kit.event())
    kit.imds.answer = Failure()
    kit.approver.start()
    kit.approver.receive([kit.token(kit.event())])
    until(lambda: kit.approver.wake() or kit.see(kit.event()) or Failure.count >= 2)
    assert sum("Approvals failed" in entry.getMessage() for entry in caplog.records) == 1


# An approval that arrives before the event.


@pytest.mark.parametrize("restarted", [False, True])
def test_approval_received_before_the_event_waits_for_the_event(kit, restarted):
    kit.go(2)
    kit.offer(kit.token(kit.event()))
    kit.go(60)
    assert kit.outcomes == []
    if restarted:
        kit.restart()
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


def test_approval_of_an_event_that_never_appears_is_refused_at_expiry(kit):
    kit.go(2)
    kit.offer(kit.token(kit.event(), valid_seconds=600))
    kit.go(10 * 60 + 30)
    assert kit.outcomes == []
    kit.go(60)
    assert kit.outcomes == [("approval_refused", "event_unknown")]
    kit.go(5, kit.event())
    assert kit.imds.posts == []


def test_approval_of_a_completed_event_is_refused_immediately(kit):
    event = kit.event()
    kit.record_change(Transition.CANCELED, event)
    kit.go(2)
    kit.offer(kit.token(event))
    kit.go(2)
    assert kit.outcomes == [("approval_refused", "event_unknown")]


@pytest.mark.parametrize("decision", ["approve", "hold"])
def test_decision_counts_when_its_key_file_is_complete(kit, decision):
    file = kit.key("k1").with_name("k1.key.pub")
    whole = file.read_bytes()
    kit.see(kit.event())
    token = kit.token(kit.event(), decision)
    file.write_bytes(whole[:40])
    kit.offer(token)
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "key_unusable")]
    file.write_bytes(whole)
    kit.go(3, kit.event())
    assert kit.imds.posts == ([["E-1"]] if decision == "approve" else [])
    assert kit.held == (set() if decision == "approve" else {"E-1"})
