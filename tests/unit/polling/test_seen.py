"""The documents that were seen while the outbox was being loaded."""

from datetime import datetime, timedelta, timezone

from bridge.clock import Instant
from bridge.events.event import Document, ScheduledEvent
from bridge.polling.seen import SeenDocuments

START = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)


def at(seconds):
    return Instant(wall=START + timedelta(seconds=seconds), monotonic=float(seconds))


def event(event_id, status="Scheduled"):
    return ScheduledEvent(event_id=event_id, event_type="Freeze", event_status=status)


def events(count, *, name="E"):
    return [event(f"{name}-{number}") for number in range(count)]


def document(incarnation, *shown):
    return Document(incarnation=incarnation, events=shown)


def test_each_document_is_there_at_the_first_and_the_last_moment_when_it_was_seen():
    seen = SeenDocuments()
    for moment, incarnation in enumerate([1, 1, 1, 2, 1]):
        seen.add(document(incarnation), at(moment))
    found = [(shown.incarnation, moment.monotonic) for shown, moment in seen]
    assert found == [(1, 0.0), (1, 2.0), (2, 3.0), (1, 4.0)]


def test_of_documents_that_differ_in_one_event_all_are_kept_and_the_others_once():
    seen = SeenDocuments()
    for number in range(300):
        last = event(f"last-{number}", "Started" if number % 2 else "Scheduled")
        seen.add(document(number, *events(100), last), at(number))
    found = [shown for shown, _ in seen]
    assert [shown.incarnation for shown in found] == list(range(300))
    assert len({id(each) for shown in found for each in shown.events}) == 100 + 300


def test_when_there_is_too_much_the_oldest_but_the_first_are_dropped(caplog):
    seen = SeenDocuments()
    for number in range(30):
        seen.add(document(number, *events(400, name=str(number))), at(number))
    found = [shown.incarnation for shown, _ in seen]
    assert found == [0, *range(19, 30)]
    seen.add(document(99, *events(9_000)), at(99))
    assert [shown.incarnation for shown, _ in seen] == [0, 99]
    assert len(caplog.records) == 1
