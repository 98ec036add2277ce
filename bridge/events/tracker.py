"""When the absence of an event is believed: the state between the documents and the transition table.

Absence is believed at once, with two exceptions, because a false ending sends traffic to a machine about to freeze:

- the last good answer is over 24 hours old: Azure had turned Scheduled Events off, turns it on again with the first
  request, and may take five minutes to show events. Absence ends nothing until 300 s of good answers have passed.
- the incarnation fell: the service started over. Absence counts once three good answers in a row agree on it.

Until then the event stays in the believed document, and so does the old incarnation: the agent can stop and start in
between, and the same reasons still hold. What is known of the gap before the first answer is kept as long.

`DocumentTracker.answer` only says what an answer means; `DocumentTracker.accept` takes it over once it is stored, so
that a failed commit is simply seen again with the next poll. No clock is read here and nothing is fetched.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime

import msgspec

from bridge.clock import Instant
from bridge.events.diff import SERVICE_OFF_AFTER_SECONDS, Change, Circumstances, diff, incarnation_step, is_over, pair
from bridge.events.event import Document, ScheduledEvent

#: How long Scheduled Events may take to show events after it was turned on (Microsoft: Scheduled Events for Linux VMs).
TURNING_ON_SECONDS = 300.0
AGREEING_ANSWERS = 3


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one good answer means: the document to believe from now on, and the changes that led to it."""

    document: Document
    changes: list[Change]
    is_news: bool
    """True when there is something to store: a change, another incarnation, fewer events that share a key."""
    is_settled: bool
    """True when no absence is in doubt; only then may the time of this answer be stored as the last good one."""


class _Gap(msgspec.Struct, kw_only=True):
    booted: bool
    seconds_since_good: float
    seconds_of_good: float = 0.0


class DocumentTracker:
    """The document the agent believes in, and how far it trusts what it does not see.

    *document* and *last_good_at* are what the outbox holds, null when it never saw one. *booted*: this machine has
    booted since. More than *gap_seconds* without a good answer make a gap; so does every start of the agent.
    """

    def __init__(
        self, document: Document | None, *, last_good_at: datetime | None, booted: bool, gap_seconds: float
    ) -> None:
        self.document = document
        self.gap_seconds = gap_seconds
        self._booted = booted
        self._stored_good_at = last_good_at
        self._last_good: Instant | None = None
        self._was_good = False
        self._gap: _Gap | None = None
        self._absences: Counter[str] = Counter()
        self._holds = False
        self._seen: Document | None = None

    def failed(self) -> None:
        """Note a poll without a good answer: answers before and after it are not in a row."""
        self._was_good = False
        self._absences.clear()

    def answer(
        self,
        document: Document,
        moment: Instant,
        *,
        vm_name: str | None = None,
        approved: frozenset[str] = frozenset(),
    ) -> Step | None:
        """Return what *document*, a good answer, means; null when it says nothing that was not known."""
        self._note(moment)
        if document is self._seen and self._gap is None and not self._holds:
            return None
        gap = self._gap
        gone = self._gone(document)
        held = self._held(document, gone)
        self._holds = bool(held)
        changes = diff(
            self.document,
            msgspec.structs.replace(document, events=document.events + held),
            Circumstances(
                now=moment.wall,
                gap=gap is not None,
                booted=gap is not None and gap.booted,
                seconds_since_good=0.0 if gap is None else gap.seconds_since_good,
                vm_name=vm_name,
                approved=approved,
            ),
        )
        self._seen = document
        return self._step(document, held, changes)

    def accept(self, step: Step) -> None:
        """Believe *step*, which is stored now."""
        if step.is_news:
            self.document = step.document
        if step.is_settled:
            self._gap = None

    def doubt(self) -> None:
        """Look at the next answer as if it were new: the step before it could not be stored."""
        self._seen = None

    def _note(self, moment: Instant) -> None:
        """Keep the time, and open a gap where there was one."""
        if self._last_good is not None:
            elapsed = moment.seconds_since(self._last_good)
            if elapsed > self.gap_seconds:
                self._open_gap(elapsed, booted=False)
            elif self._gap is not None and self._was_good:
                self._gap.seconds_of_good += elapsed
        elif self.document is not None:
            self._open_gap(_age(self._stored_good_at, moment.wall), booted=self._booted)
        self._last_good = moment
        self._was_good = True

    def _open_gap(self, seconds: float, *, booted: bool) -> None:
        if self._gap is None:
            self._gap = _Gap(booted=booted, seconds_since_good=seconds)
        else:
            self._gap.seconds_since_good = max(self._gap.seconds_since_good, seconds)
            self._gap.seconds_of_good = 0.0

    def _gone(self, document: Document) -> list[ScheduledEvent]:
        # One of several that share a key is not gone while another is there: `pair` leaves it out, nobody holds it.
        before = () if self.document is None else self.document.events
        return pair(before, document.events)[1]

    def _held(self, document: Document, gone: list[ScheduledEvent]) -> tuple[ScheduledEvent, ...]:
        """Return the events that are gone from *document* but not from the world, for all we know."""
        doubtful = [event for event in gone if not is_over(event)]
        self._absences = Counter({event.key: self._absences[event.key] + 1 for event in doubtful})
        if self._is_turning_on:
            return tuple(doubtful)
        if self._fell(document):
            return tuple(event for event in doubtful if self._absences[event.key] < AGREEING_ANSWERS)
        return ()

    @property
    def _is_turning_on(self) -> bool:
        gap = self._gap
        return (
            gap is not None
            and gap.seconds_since_good >= SERVICE_OFF_AFTER_SECONDS
            and gap.seconds_of_good < TURNING_ON_SECONDS
        )

    def _fell(self, document: Document) -> bool:
        if self.document is None:
            return False
        step = incarnation_step(self.document.incarnation, document.incarnation)
        return step is not None and step < 0

    def _step(self, document: Document, held: tuple[ScheduledEvent, ...], changes: list[Change]) -> Step:
        if held and self.document is not None:
            # The old incarnation stays while something is held, so that the reason to hold it survives a restart.
            document = Document(incarnation=self.document.incarnation, events=document.events + held)
        before = self.document
        is_news = (
            before is None
            or bool(changes)
            or before.incarnation != document.incarnation
            or len(before.events) != len(document.events)
        )
        return Step(document=document, changes=changes, is_news=is_news, is_settled=not held)


def _age(good_at: datetime | None, now: datetime) -> float:
    return SERVICE_OFF_AFTER_SECONDS if good_at is None else max((now - good_at).total_seconds(), 0.0)
