"""Events that an answer shows as they were before: when that is news, and when another front end answers late.

Front ends of the metadata service answer in turn, and one of them may be minutes behind. Where its incarnation is lower
`bridge.events.tracker` knows it by that; where the incarnations are equal, or missing, only the events tell. Azure
starts no event twice, so an event that is Started and then Scheduled again is what a late front end shows, unless the
incarnation rose: it is believed once three good answers in a row agree. And an event that went to and fro twice within
minutes stays as it was told last, until nothing has contradicted its other form for five minutes.

All else is believed at once: every event that appears and every start, and an ending unless its event came back twice.
Nothing of this concerns an event without an EventId: the next one of its kind looks the same. How often an event went
to and fro is not stored, so a restart may tell of it a few times more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import msgspec

from bridge.clock import Instant
from bridge.events.diff import Change, changed_fields, incarnation_step
from bridge.events.event import Document, ScheduledEvent

AGREEING_ANSWERS = 3
#: How long what an event was before its last change counts; and how long the other form must go uncontradicted.
REVERSAL_SECONDS = 300.0
_TO_AND_FRO = 2

_SCHEDULED, _STARTED = "Scheduled", "Started"

_Pair: TypeAlias = tuple[ScheduledEvent, ScheduledEvent | None]
"""An event as it is known, and as an answer shows it; None: it does not."""


class _Reversal(msgspec.Struct, kw_only=True):
    """The last change of one event."""

    before: ScheduledEvent | None
    """What the event was until then; None: absent."""
    at: Instant
    """When it changed, or when the change was last contradicted."""
    returns: int
    """How many changes in a row, this one included, brought back what the event was before."""


class Reversals:
    """The events that go back to what they were, from answer to answer."""

    def __init__(self) -> None:
        self._last: dict[str, _Reversal] = {}
        self._doubted: dict[str, ScheduledEvent | None] = {}
        """From the key of an event to what the last answer showed instead of it; None: nothing."""
        self._agreeing: dict[str, int] = {}
        """How many answers in a row have shown that."""

    @property
    def has_doubts(self) -> bool:
        """Return whether the last answer showed something that is not believed yet."""
        return bool(self._doubted)

    def interrupt(self) -> None:
        """Note a poll without a good answer: answers before and after it are not in a row."""
        self._agreeing.clear()

    def believe(self, tracked: Document, shown: Document, moment: Instant) -> tuple[Document, frozenset[str]]:
        """Return *shown* with what is doubted as *tracked* has it, and the keys of the events whose absence is."""
        pairs = _pairs(tracked, shown)
        self._note_contradictions(pairs, moment)
        doubted = {key: now for key, (was, now) in pairs.items() if self._is_doubtful(key, was, now, moment)}
        if doubted and _has_risen(tracked, shown):
            doubted = {}
        self._agreeing = {key: self._count(key, now) for key, now in doubted.items()}
        self._doubted = doubted
        kept = {key: pairs[key][0] for key, now in doubted.items() if now is not None}
        if kept:
            events = tuple(kept.get(event.key, event) for event in shown.events)
            shown = msgspec.structs.replace(shown, events=events)
        return shown, frozenset(key for key, now in doubted.items() if now is None)

    def commit(self, before: Document | None, after: Document, changes: Iterable[Change], moment: Instant) -> None:
        """Take over *changes*, which led from *before* to *after* and are stored."""
        before = before or Document()
        old, new = _by_key(before), _by_key(after)
        for key in {change.event.key for change in changes if change.event.event_id is not None}:
            was, now, last = old.get(key), new.get(key), self._recent(key, moment)
            if was is None and last is None:
                continue  # it appeared for the first time, as far as is known
            is_return = last is not None and _is_same(last.before, now) and not _has_risen(before, after)
            returns = last.returns + 1 if last is not None and is_return else 0
            self._last[key] = _Reversal(before=was, at=moment, returns=returns)
        self._last = {key: last for key in self._last if (last := self._recent(key, moment)) is not None}

    def _is_doubtful(self, key: str, was: ScheduledEvent, now: ScheduledEvent | None, moment: Instant) -> bool:
        if _is_same(was, now) or (now is not None and now.event_status == _STARTED != was.event_status):
            return False
        last = self._recent(key, moment)
        if last is not None and last.returns >= _TO_AND_FRO and _is_same(last.before, now):
            return True
        is_backwards = now is not None and (was.event_status, now.event_status) == (_STARTED, _SCHEDULED)
        return is_backwards and self._count(key, now) < AGREEING_ANSWERS

    def _count(self, key: str, now: ScheduledEvent | None) -> int:
        """Return how many answers in a row, this one included, show *now* instead of what is known."""
        is_repeated = key in self._doubted and _is_same(self._doubted[key], now)
        return self._agreeing.get(key, 0) + 1 if is_repeated else 1

    def _note_contradictions(self, pairs: Mapping[str, _Pair], moment: Instant) -> None:
        """Note that events are shown as they are known, which the answer before did not do."""
        for key, other in self._doubted.items():
            if key in pairs and _is_same(*pairs[key]):
                self._last[key] = _Reversal(before=other, at=moment, returns=_TO_AND_FRO)

    def _recent(self, key: str, moment: Instant) -> _Reversal | None:
        last = self._last.get(key)
        return last if last is not None and moment.seconds_since(last.at) < REVERSAL_SECONDS else None


def _pairs(tracked: Document, shown: Document) -> dict[str, _Pair]:
    """Return each event of *tracked* that can be told from all others, with what *shown* has of it."""
    after, shown_keys = _by_key(shown), {event.key for event in shown.events}
    return {
        key: (was, after.get(key)) for key, was in _by_key(tracked).items() if key in after or key not in shown_keys
    }


def _by_key(document: Document) -> dict[str, ScheduledEvent]:
    """Return the events of *document* that have an EventId, and none in common."""
    counts = Counter(event.key for event in document.events)
    return {event.key: event for event in document.events if event.event_id is not None and counts[event.key] == 1}


def _is_same(one: ScheduledEvent | None, other: ScheduledEvent | None) -> bool:
    if one is None or other is None:
        return one is other
    return not changed_fields(one, other)


def _has_risen(before: Document, after: Document) -> bool:
    step = incarnation_step(before.incarnation, after.incarnation)
    return step is not None and step > 0
