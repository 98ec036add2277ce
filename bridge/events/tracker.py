"""The document that the agent takes for true, and when it believes that an event which is absent has ended.

It stands between the answers of the metadata service and the transition table of `bridge.events.diff`. Absence is
believed at once, with two exceptions, because a false ending sends traffic to a machine that is about to freeze:

- the last good answer is over 24 hours old: Azure had turned Scheduled Events off, turns it on again with the first
  request, and may take five minutes to show events. Absence ends nothing until 300 s of good answers have passed.
- the incarnation fell: the service started over. Absence counts once three good answers in a row agree on it.

Until then the event stays in the tracked document, and so does the old incarnation: the agent can stop and start in
between, and the same reasons still hold. What is known of the gap before the first answer is kept as long.

`DocumentTracker.observe` only returns what an answer means; `DocumentTracker.commit` takes it over once it is stored,
so that what could not be stored is seen again with the next poll. No clock is read here and nothing is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

import msgspec

from bridge.clock import Instant
from bridge.events.diff import Change, DiffContext, diff, incarnation_step
from bridge.events.event import SERVICE_OFF_AFTER_SECONDS, Document, ScheduledEvent

#: How long Scheduled Events may take to show events after it was turned on (Microsoft: Scheduled Events for Linux VMs).
TURNING_ON_SECONDS = 300.0
AGREEING_ANSWERS = 3


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What one good answer means: the document to track from now on, and the changes that led to it."""

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

    @property
    def is_service_turning_on(self) -> bool:
        return self.seconds_since_good >= SERVICE_OFF_AFTER_SECONDS and self.seconds_of_good < TURNING_ON_SECONDS


class DocumentTracker:
    """Tracks the document from answer to answer.

    *document* and *last_good_at* are what the outbox holds, None when it never saw one. *booted*: this machine has
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
        self._withholds = False
        self._observed: Document | None = None

    def poll_failed(self) -> None:
        """Note a poll without a good answer: answers before and after it are not in a row."""
        self._was_good = False
        self._absences.clear()

    def observe(
        self,
        document: Document,
        moment: Instant,
        *,
        vm_name: str | None = None,
        approved: frozenset[str] = frozenset(),
    ) -> Update | None:
        """Return what *document*, a good answer, means; None when it holds nothing that was not known."""
        self._note(moment)
        if document is self._observed and self._gap is None and not self._withholds:
            return None
        gap = self._gap
        ctx = DiffContext(
            now=moment.wall,
            has_gap=gap is not None,
            booted=gap is not None and gap.booted,
            seconds_since_good=0.0 if gap is None else gap.seconds_since_good,
            vm_name=vm_name,
            approved=approved,
        )
        changes = diff(self.document, document, ctx)
        withheld = self._withheld(document, changes)
        self._withholds = bool(withheld)
        self._observed = document
        if withheld:
            keys = {event.key for event in withheld}
            changes = [change for change in changes if change.event.key not in keys]
        return self._update(document, withheld, changes)

    def commit(self, update: Update) -> None:
        """Go on from *update*, which is stored now."""
        if update.is_news:
            self.document = update.document
        if update.is_settled:
            self._gap = None

    def invalidate(self) -> None:
        """Compare the next answer as if it were new: the update before it could not be stored."""
        self._observed = None

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

    def _withheld(self, document: Document, changes: Sequence[Change]) -> tuple[ScheduledEvent, ...]:
        """Return the events that *changes* would end for their absence, but whose absence is not believed yet."""
        shown = {event.key for event in document.events}
        absent = [change.event for change in changes if change.event.key not in shown]
        self._absences = Counter({event.key: self._absences[event.key] + 1 for event in absent})
        if self._gap is not None and self._gap.is_service_turning_on:
            return tuple(absent)
        if self._has_incarnation_fallen(document):
            return tuple(event for event in absent if self._absences[event.key] < AGREEING_ANSWERS)
        return ()

    def _has_incarnation_fallen(self, document: Document) -> bool:
        if self.document is None:
            return False
        step = incarnation_step(self.document.incarnation, document.incarnation)
        return step is not None and step < 0

    def _update(self, document: Document, withheld: tuple[ScheduledEvent, ...], changes: list[Change]) -> Update:
        before = self.document
        if withheld and before is not None:
            # The old incarnation stays while an event is withheld, so that the reason for it survives a restart.
            document = Document(incarnation=before.incarnation, events=document.events + withheld)
        is_news = (
            before is None
            or bool(changes)
            or before.incarnation != document.incarnation
            or len(before.events) != len(document.events)
        )
        return Update(document=document, changes=changes, is_news=is_news, is_settled=not withheld)


def _age(good_at: datetime | None, now: datetime) -> float:
    return SERVICE_OFF_AFTER_SECONDS if good_at is None else max((now - good_at).total_seconds(), 0.0)
