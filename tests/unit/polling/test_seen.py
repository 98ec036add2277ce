"""The documents that were seen while the outbox was being loaded."""

from datetime import datetime, timedelta, timezone

from bridge.clock import Instant
from bridge.events.event import Document, ScheduledEvent
from bridge.polling.seen import SeenDocuments

START = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)


def at(seconds):
    return Instant(wall=START + timedelta(seconds=seconds), monotonic=float(seconds))


def document(incarnation, events=0):
    shown = tuple(
        ScheduledEvent(event_id=f"E-{number}", event_type="Freeze", event_status="Scheduled")
        for number in range(events)
    )
    return Document(incarnation=incarnation, events=shown)


def test_each_document_is_there_at_the_first_and_the_last_moment_when_it_was_seen():
    seen = SeenDocuments()
    for moment, incarnation in enumerate([1, 1, 1, 2, 1]):
        seen.add(document(incarnation), at(moment))
    found = [(shown.incarnation, moment.monotonic) for shown, moment in seen]
    assert found == [(1, 0.0), (1, 2.0), (2, 3.0), (1, 4.0)]


def test_the_oldest_are_dropped_when_there_are_too_many_events_in_them():
    seen = SeenDocuments()
    for number in range(30):
        seen.add(document(number, events=100), at(number))
    found = [shown.incarnation for shown, _ in seen]
    assert found == list(range(10, 30))
    seen.add(document(99, events=3_000), at(99))
    assert [shown.incarnation for shown, _ in seen] == [99]
