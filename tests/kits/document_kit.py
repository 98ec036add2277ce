"""Events, documents, and Hypothesis strategies for the transition table and the tracker."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
from hypothesis import strategies as st

from bridge.clock import Instant
from bridge.events.event import Document, ScheduledEvent, compact_json
from bridge.events.record import EventHistory, TransitionRecord, repeat_key
from bridge.events.tracker import DocumentTracker, Update
from bridge.events.transitions import Step, classify_ending, classify_shown, is_over, match_events

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
SOON = NOW + timedelta(minutes=10)
PAST = NOW - timedelta(minutes=10)
VM = "vm_0"


def event(status: str = "Scheduled", **fields: Any) -> ScheduledEvent:
    """Return a Reboot of this VM in ten minutes, with *fields* replaced."""
    fields = {"event_id": "A-1", "event_type": "Reboot", "resources": (VM,), "not_before": SOON, **fields}
    return ScheduledEvent(event_status=status, **fields)


def document(*events: ScheduledEvent, incarnation: int | str | None = 1) -> Document:
    """Return a document of *events*."""
    return Document(incarnation=incarnation, events=events)


def changes_between(
    before: Document, after: Document, *, was_started: bool = False, came_back: bool = False, **known: Any
) -> list[TransitionRecord]:
    """Return the changes from *before* to *after* without any confirmation, endings first."""
    step = Step(**{"before": before, "after": after, "observed_at": NOW, "vm_name": VM, **known})
    pairs, vanished = match_events(before.events, after.events)
    endings = [
        classify_ending(one, step, was_started=was_started, came_back=came_back) for one in vanished if not is_over(one)
    ]
    shown = [classify_shown(was, now, step) for was, now in pairs]
    return [*endings, *(change for change in shown if change is not None)]


class History:
    """The part of the outbox that the tracker reads."""

    def __init__(self) -> None:
        self._events: dict[str, EventHistory] = {}

    def __call__(self, event_key: str) -> EventHistory:
        return self._events.get(event_key, EventHistory())

    def add(self, changes: Iterable[TransitionRecord]) -> None:
        for change in changes:
            known, key = self(change.event_key), repeat_key(change.transition, change.event)
            is_started = change.event is not None and change.event.event_status == "Started"
            self._events[change.event_key] = EventHistory(
                was_started=known.was_started or is_started,
                has_ended=known.has_ended or change.transition.is_ending,
                counts={**known.counts, key: known.counts.get(key, 0) + 1},
            )


class Agent:
    """A tracker with its outbox: the stored document and the history survive `restart`."""

    def __init__(self, stored: Document | None = None, **fields: Any) -> None:
        self.history = History()
        self.stored = stored
        self.seen: list[tuple[float, str, str]] = []
        """Second, transition, and evidence of each change."""
        self.changes: list[TransitionRecord] = []
        self.writes = 0
        self.tracker = self._start(**fields)

    def _start(self, **fields: Any) -> DocumentTracker:
        values = {"history": self.history, "last_good_at": NOW, "gap_seconds": 10.0, **fields}
        return DocumentTracker(self.stored, **values)

    def restart(self, **fields: Any) -> None:
        self.tracker = self._start(**fields)

    def observe(self, shown: Document, seconds: float, *, wall_offset: float = 0.0, **known: Any) -> Update | None:
        """Observe and store the response *shown* at *seconds* after NOW."""
        update = self.tracker.observe(shown, at(seconds, wall_offset=wall_offset), **{"vm_name": VM, **known})
        if update is not None:
            self.tracker.commit(update)
            self.history.add(update.changes)
            self.changes += update.changes
            self.seen += [(seconds, one.transition.value, one.evidence.value) for one in update.changes]
            if update.is_news:
                self.stored = update.document
                self.writes += 1
        return update

    def feed(self, *responses: Document | None, start: int = 1) -> list[tuple[float, str, str]]:
        """Observe one response per second. None is a failed poll. Return the changes since the call."""
        first = len(self.seen)
        for second, response in enumerate(responses, start=start):
            if response is not None:
                self.observe(response, second)
        return self.seen[first:]


def at(seconds: float, *, wall_offset: float = 0.0) -> Instant:
    """Return the instant *seconds* after NOW on both clocks; the wall clock is *wall_offset* ahead."""
    return Instant(wall=NOW + timedelta(seconds=seconds + wall_offset), monotonic=1000.0 + seconds)


def _alternating(position: int, _chance: random.Random) -> bool:
    return position % 2 == 1


def _in_pairs(position: int, _chance: random.Random) -> bool:
    return position % 4 >= 2


def _one_in_ten(_position: int, chance: random.Random) -> bool:
    return chance.random() < 0.1


#: Functions that decide by its position whether a response is stale.
STALE_PATTERNS = (_alternating, _in_pairs, _one_in_ten)

_statuses = st.sampled_from(["Scheduled", "Started", "Completed", "Canceled", "Paused"])
_events: st.SearchStrategy[ScheduledEvent] = st.builds(
    ScheduledEvent,
    event_id=st.sampled_from(["A", "B", "C", None]),
    event_status=_statuses,
    event_type=st.sampled_from(["Freeze", "Reboot", None]),
    resources=st.sampled_from([(VM,), ("x", VM), (VM, "x"), (), None]),
    not_before=st.sampled_from([SOON, PAST, None]),
    duration_seconds=st.sampled_from([None, 0, 5]),
    extra=st.sampled_from([{}, {"X": 1}]),
)
#: Documents of up to four events with distinct keys.
DOCUMENTS: st.SearchStrategy[Document] = st.builds(
    Document,
    incarnation=st.one_of(st.none(), st.integers(0, 5), st.sampled_from(["1", "2", "abc"])),
    events=st.lists(_events, max_size=4, unique_by=lambda e: e.key).map(tuple),
)


def same_content(one: Document, other: Document) -> bool:
    """Return whether both documents contain the same events, regardless of incarnation and order."""
    return Counter(map(_content, one.events)) == Counter(map(_content, other.events))


def _content(event: ScheduledEvent) -> str:
    """Return *event* as text, with Resources as a set, and the text of NotBefore only if it is unreadable."""
    plain = msgspec.to_builtins(event)
    if event.resources is not None:
        plain["resources"] = sorted(set(event.resources))
    plain["not_before_raw"] = (event.not_before_raw or "").strip() if event.not_before is None else ""
    return compact_json(plain)
