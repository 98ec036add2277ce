"""A clock that is wrong for a moment ends nothing that was kept, and lets nothing be posted that has expired."""

from approver_kit import BORIS

from bridge.config.approval import RuleSettings
from bridge.errors import ImdsStatus

FREEZE = RuleSettings(name="freeze", action="approve", event_types=("Freeze",))
TWO_HOURS = 7200.0
THREE_DAYS = 3 * 86_400.0


def undated(kit):
    return kit.event(not_before=None, not_before_raw=None)


def set_ahead_for_a_moment(kit, *events, seconds=TWO_HOURS):
    kit.wall_jump_seconds = seconds
    kit.go(2, *events)
    kit.wall_jump_seconds = 0.0
    kit.go(2, *events)


def test_an_approval_that_came_before_its_event_outlives_a_clock_that_is_ahead_for_a_moment(make):
    kit = make()
    kit.offer(kit.token(kit.event(), valid_seconds=3600))
    set_ahead_for_a_moment(kit)
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_one_of_two_approvals_outlives_a_clock_that_is_ahead_for_a_moment(make):
    kit = make(required=2)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), valid_seconds=3600))
    set_ahead_for_a_moment(kit, kit.event())
    kit.offer(kit.token(kit.event(), kid="k2", approver=BORIS))
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_an_accepted_approval_outlives_a_clock_that_is_ahead_for_a_moment_and_is_not_posted_in_it(make):
    kit = make()
    kit.see(undated(kit))
    kit.imds.get_answer = ImdsStatus("no", status=503)
    kit.offer(kit.token(undated(kit), valid_seconds=3600))
    kit.wall_jump_seconds = TWO_HOURS
    kit.imds.get_answer = None
    kit.go(20, undated(kit))
    assert (kit.imds.posts, kit.outcomes) == ([], [])
    kit.wall_jump_seconds = 0.0
    kit.go(5, undated(kit))
    assert kit.imds.posts == [["E-1"]]


def test_a_clock_that_stays_ahead_is_believed_and_ends_what_has_expired(make):
    kit = make()
    kit.see(undated(kit))
    kit.imds.get_answer = ImdsStatus("no", status=503)
    kit.offer(kit.token(undated(kit), valid_seconds=3600))
    kit.wall_jump_seconds = TWO_HOURS
    kit.imds.get_answer = None
    kit.go(310, undated(kit))
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "expired")]


def test_a_hold_is_not_forgotten_by_a_clock_that_is_days_ahead_for_a_moment(make):
    kit = make(FREEZE)
    kit.offer(kit.token(kit.event(), "hold"))
    kit.go(1)
    kit.wait(3600)
    set_ahead_for_a_moment(kit, seconds=THREE_DAYS)
    kit.go(3, kit.event())
    assert kit.imds.posts == []


def test_an_old_hold_on_an_event_that_one_document_lacks_is_not_forgotten(make):
    kit = make(FREEZE)
    kit.offer(kit.token(undated(kit), "hold"))
    kit.go(2, undated(kit))
    kit.record(undated(kit))
    kit.wait(THREE_DAYS)
    kit.go(1)
    kit.go(3, undated(kit))
    assert kit.imds.posts == []
