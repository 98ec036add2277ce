"""The one-line summary of a record for people."""

from datetime import timedelta

import pytest

from bridge.sink import Evidence, Impact, Transition
from bridge.testing.records import sample_event as event
from bridge.testing.records import sample_record as record
from sinks.sentence import sentence
from sinks.webhook.alerts import details, summary


def test_sentence_contains_the_vm_the_times_and_the_impact():
    assert sentence(record()) == (
        "2026-11-20T11:00:01.123Z scheduled: Freeze of this VM (WestNO_0) and 1 more, not before 2026-11-20 11:15:00 "
        "UTC. Virtual machine is being paused because of a memory-preserving Live Migration \u2603. Impact 5 s"
    )


def test_sentence_of_an_ending_contains_the_evidence():
    said = sentence(record(transition=Transition.CANCELED, evidence=Evidence.INFERRED))
    assert " canceled (inferred): Freeze of" in said
    assert "not before" not in said


@pytest.mark.parametrize("text", [sentence, summary, details])
def test_messages_omit_the_remaining_time_and_endings_omit_not_before(text):
    assert len({text(record(notice_seconds=seconds)) for seconds in (900.0, 5.0, -60.0, None)}) == 1
    endings = [text(record(transition=each)) for each in Transition if each.is_ending]
    assert len(endings) == 3
    assert not [ending for ending in endings if "not before" in ending]


def test_sentence_recommends_a_redeploy_before_a_predicted_failure():
    ahead = timedelta(days=6, hours=23).total_seconds()
    fields = {"event_type": "Redeploy", "event_source": "Platform"}
    assert "A hardware failure is predicted: Microsoft recommends" in sentence(
        record(notice_seconds=ahead, event=event(**fields))
    )
    assert "predicted" not in sentence(record(notice_seconds=600.0, event=event(**fields)))
    assert "predicted" not in sentence(
        record(notice_seconds=ahead, event=event(**fields, resources=("a",)), transition=Transition.CANCELED)
    )


def test_sentence_of_a_user_event_mentions_the_approval():
    assert "An approval starts the event now" in sentence(record(event=event(event_source="User")))
    started = event(event_source="User", event_status="Started")
    assert "An approval" not in sentence(record(event=started, transition=Transition.STARTED))


def test_sentence_marks_an_unreadable_not_before():
    said = sentence(record(notice_seconds=None, event=event(not_before=None, not_before_raw="soon")))
    assert "not before 'soon' (unreadable)" in said
    assert "not before" not in sentence(record(notice_seconds=None, event=event(not_before=None, not_before_raw="")))


def test_sentence_escapes_line_breaks_and_terminal_sequences():
    said = sentence(record(event=event(description="a\n2026 canceled\x1b[31m\x9b\u2028\ud800")))
    assert "\\n2026 canceled\\x1b[31m\\x9b\\u2028\\ud800" in said
    assert said.isprintable()
    said.encode()


def test_sentence_escapes_bidirectional_control_characters():
    said = sentence(record(affects_this_vm=False, event=event(resources=("vm_\u202e1_mv", "vm\u2066_2"))))
    assert "vm_\\u202e1_mv" in said
    assert "vm\\u2066_2" in said


@pytest.mark.parametrize(
    ("impact", "text"),
    [
        (Impact(longest_seconds=3.04, resolution_seconds=0.05), "Measured pause: 3.0 s (resolution 0.05 s)"),
        (Impact(longest_seconds=0.0, resolution_seconds=0.05), "Measured pause: none"),
        (Impact(longest_seconds=3.04), "Measured pause: 3.0 s (resolution unknown)"),
        (Impact(reason="The agent sampled only a part of the event."), "Measured pause: unknown (The agent sampled"),
        (Impact(downtime_seconds=41.2, downtime_uncertainty_seconds=1.5), "Measured downtime: 41.2 s (up to 1.5 s"),
    ],
)
def test_sentence_of_an_ending_contains_the_measured_impact(impact, text):
    assert text in sentence(record(transition=Transition.COMPLETED, impact=impact))
