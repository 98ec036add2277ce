"""The document that the agent takes for true, and when it believes that an event which is absent has ended.

It stands between the answers of the metadata service and the transition table of `bridge.events.diff`. Absence is
believed at once, with three exceptions, because a false ending sends traffic to a machine that is about to freeze:

- the last good answer is over 24 hours old: Azure had turned Scheduled Events off, turns it on again with the first
  request, and may take five minutes to show events. Absence ends nothing until 300 s of good answers have passed.
- the incarnation fell: the service started over, or another front end of it answers. An absence counts once three good
  answers in a row agree on it, and so it does within five minutes when the incarnation is back where it fell from.
- it came back and fell again within these five minutes: front ends answer in turn, and one of them is stale. Absence
  ends nothing until five minutes after the last fall, and nothing else that an answer with a lower incarnation than
  another had changes what is known of an event, but for its start.

Until then the event stays in the tracked document, and so do the old incarnation and the fall: the agent can stop and
start in between, and the same reasons still hold. What is known of the gap before the first answer is kept as long.

`DocumentTracker.observe` only returns what an answer means; `DocumentTracker.commit` takes it over once it is stored,
so that what could not be stored is seen again with the next poll. No clock is read here and nothing is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from bridge.clock import Instant
from bridge.events.diff import Change, DiffContext, diff, incarnation_step
from bridge.events.event import (
    SERVICE_OFF_AFTER_SECONDS,
    Document,
    Incarnation,
    IncarnationFall,
    ScheduledEvent,
)

#: How long Scheduled Events may take to show events after it was turned on (Microsoft: Scheduled Events for Linux VMs).
TURNING_ON_SECONDS = 300.0
AGREEING_ANSWERS = 3
#: How long after a fall of the incarnation absences are doubtful.
FALL_DOUBT_SECONDS = 300.0
#: How much older than the last fall the stored one may be: storing each would write as often as front ends change.
STORED_FALL_SECONDS = 120.0

_STARTED = "Started"


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
    shown_since: set[str] = msgspec.field(default_factory=set)
    """The keys of the events that were shown since the gap began."""

    @property
    def is_service_turning_on(self) -> bool:
        return self.seconds_since_good >= SERVICE_OFF_AFTER_SECONDS and self.seconds_of_good < TURNING_ON_SECONDS


class _IncarnationWatch:
    """Whether the incarnation fell in the last minutes, from answer to answer and over a restart."""

    def __init__(self, document: Document | None) -> None:
        self._fall = None if document is None else document.fall
        self._shown = None if document is None else document.incarnation
        if self._fall is not None:
            self._shown = self._fall.shown
        self._fell_at: Instant | None = None

    def note(self, incarnation: Incarnation, moment: Instant) -> None:
        """Take the incarnation of one good answer."""
        fall = self._recent(moment)
        if _is_lower(incarnation, self._shown):
            self._fell_at = moment
            is_repeated = fall is not None and (fall.is_repeated or not _is_lower(self._shown, fall.highest))
            fall = IncarnationFall(
                at=moment.wall,
                is_repeated=is_repeated,
                shown=incarnation,
                highest=fall.highest if fall is not None and is_repeated else self._shown,
            )
        elif fall is not None and fall.shown != incarnation:
            highest = incarnation if _is_lower(fall.highest, incarnation) else fall.highest
            fall = msgspec.structs.replace(fall, shown=incarnation, highest=highest)
        self._fall, self._shown = fall, incarnation

    @property
    def is_back(self) -> bool:
        """Return whether the last answer has the incarnation again that it fell from, or a higher one."""
        return self._fall is not None and not _is_lower(self._fall.shown, self._fall.highest)

    @property
    def is_stale(self) -> bool:
        """Return whether the last answer came from the stale one of front ends that answer in turn."""
        return self._fall is not None and self._fall.is_repeated and _is_lower(self._fall.shown, self._fall.highest)

    @property
    def fall(self) -> IncarnationFall | None:
        """Return the last fall, None when there was none in the last minutes."""
        return self._fall

    def _recent(self, moment: Instant) -> IncarnationFall | None:
        """Return the last fall unless it is over; one that is stored in the future was just now."""
        if self._fall is None:
            return None
        if self._fell_at is None:
            age = min(max((moment.wall - self._fall.at).total_seconds(), 0.0), FALL_DOUBT_SECONDS)
            self._fell_at = Instant(wall=moment.wall - timedelta(seconds=age), monotonic=moment.monotonic - age)
        return self._fall if moment.seconds_since(self._fell_at) < FALL_DOUBT_SECONDS else None


class DocumentTracker:
    """Tracks the document from answer to answer.

    *document* and *last_good_at* are what the outbox holds, None when it never saw one. *booted*: this machine has
    booted since, at *booted_at* at the latest. More than *gap_seconds* without a good answer make a gap; so does every
    start of the agent.
    """

    def __init__(
        self,
        document: Document | None,
        *,
        last_good_at: datetime | None,
        booted: bool,
        gap_seconds: float,
        booted_at: datetime | None = None,
    ) -> None:
        self.document = document
        self.gap_seconds = gap_seconds
        self._booted = booted
        self._booted_at = booted_at
        self._stored_good_at = last_good_at
        self._last_good: Instant | None = None
        self._was_good = False
        self._gap: _Gap | None = None
        self._stored_fall = None if document is None else document.fall
        self._incarnations = _IncarnationWatch(document)
        self._absences: Counter[str] = Counter()
        self._doubted: frozenset[str] = frozenset()
        self._was_stale = False
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
        self._incarnations.note(document.incarnation, moment)
        shown, was_stale, self._was_stale = document, self._was_stale, self._incarnations.is_stale
        if shown is self._observed and self._gap is None and not (self._doubted or was_stale):
            return None
        if self._was_stale and self.document is not None:
            document = _updated_by_stale(self.document, document)
        changes = diff(self.document, document, self._context(moment, vm_name=vm_name, approved=approved))
        withheld = self._withheld(document, changes)
        self._doubted = frozenset(event.key for event in withheld)
        self._observed = shown
        if self._gap is not None:
            self._gap.shown_since.update(event.key for event in document.events)
        if withheld:
            changes = [change for change in changes if change.event.key not in self._doubted]
        return self._update(document, withheld, changes)

    def commit(self, update: Update) -> None:
        """Go on from *update*, which is stored now."""
        if update.is_news or self.document is None:
            self.document = update.document
            self._stored_fall = update.document.fall
        else:
            self.document = msgspec.structs.replace(self.document, fall=update.document.fall)
        if update.is_settled:
            self._gap = None

    def invalidate(self) -> None:
        """Compare the next answer as if it were new: the update before it could not be stored."""
        self._observed = None

    def _context(self, moment: Instant, *, vm_name: str | None, approved: frozenset[str]) -> DiffContext:
        gap = self._gap
        return DiffContext(
            now=moment.wall,
            has_gap=gap is not None,
            booted=gap is not None and gap.booted,
            booted_at=self._booted_at,
            shown_since_boot=frozenset() if gap is None else gap.shown_since,
            seconds_since_good=0.0 if gap is None else gap.seconds_since_good,
            vm_name=vm_name,
            approved=approved,
            doubted=self._doubted,
        )

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
        fall = self._incarnations.fall
        if fall is not None and fall.is_repeated:
            return tuple(absent)
        if self._incarnations.is_back or self._is_below_tracked(document):
            return tuple(event for event in absent if self._absences[event.key] < AGREEING_ANSWERS)
        return ()

    def _is_below_tracked(self, document: Document) -> bool:
        return self.document is not None and _is_lower(document.incarnation, self.document.incarnation)

    def _update(self, document: Document, withheld: tuple[ScheduledEvent, ...], changes: list[Change]) -> Update:
        before, fall = self.document, self._incarnations.fall
        if withheld and before is not None:
            # The old incarnation stays while an event is withheld, so that the reason for it survives a restart.
            document = Document(incarnation=before.incarnation, events=document.events + withheld, fall=fall)
        elif fall is not None:
            document = msgspec.structs.replace(document, fall=fall)
        is_news = (
            before is None
            or bool(changes)
            or before.incarnation != document.incarnation
            or len(before.events) != len(document.events)
            or _is_worth_storing(fall, stored=self._stored_fall)
        )
        return Update(document=document, changes=changes, is_news=is_news, is_settled=not withheld)


def _is_worth_storing(fall: IncarnationFall | None, *, stored: IncarnationFall | None) -> bool:
    """Return whether a restart would doubt too little, or for too short a time, by the *stored* fall."""
    if fall is None or stored is None:
        return fall is not stored
    if fall.is_repeated != stored.is_repeated:
        return True
    return abs((fall.at - stored.at).total_seconds()) >= STORED_FALL_SECONDS


def _is_lower(incarnation: Incarnation, than: Incarnation) -> bool:
    """Return whether the two can be compared, and the first one is lower."""
    step = incarnation_step(than, incarnation)
    return step is not None and step < 0


def _updated_by_stale(tracked: Document, stale: Document) -> Document:
    """Return *stale* with what *tracked* knows of the same events, unless an event has started since."""
    counts = Counter(event.key for document in (tracked, stale) for event in document.events)
    # Of events that share a key nobody knows which is which: they are taken as they come.
    known = {event.key: event for event in tracked.events if counts[event.key] == 2}  # noqa: PLR2004 - one in each
    return Document(
        incarnation=tracked.incarnation,
        events=tuple(_newer(known.get(event.key, event), event) for event in stale.events),
    )


def _newer(known: ScheduledEvent, stale: ScheduledEvent) -> ScheduledEvent:
    return stale if stale.event_status == _STARTED != known.event_status else known


def _age(good_at: datetime | None, now: datetime) -> float:
    return SERVICE_OFF_AFTER_SECONDS if good_at is None else max((now - good_at).total_seconds(), 0.0)
