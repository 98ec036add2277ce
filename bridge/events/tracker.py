"""Decides whether to record a change immediately or wait until more responses confirm it.

The agent records new and worsening events immediately. If an event seems to be over, the agent waits for confirmation.
Otherwise, a consumer might send traffic to a VM that is about to freeze. The following changes are recorded only after
five good responses in a row show them:

- the absence of an event
- a return from Started to Scheduled
- an `updated` record that repeats an earlier record

In two cases, five responses are not enough. The agent then records an absence or a return to Scheduled only after all
good responses have agreed for five minutes:

- The event was absent and came back within the last five minutes.
- The last good response was over 24 hours old. Azure then turns Scheduled Events on again, which can take five minutes.

If the api-version changes, all confirmations start over. The change does not count as a gap in the responses, and the
agent updates `extra` without a record. An older version might not show all events. If an event disappears when the
agent changes to an older version, the agent records its absence only after five minutes without a good response under
the newer version.

If a response contradicts an unconfirmed change, or if the agent restarts, the confirmation starts over. A failed poll
does not reset the count of responses. Until a change is confirmed, the tracked document still contains the old event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

import msgspec

from bridge.clock import Instant
from bridge.events.active import Agreement, listed_event_ids
from bridge.events.event import SERVICE_OFF_AFTER_SECONDS, Document, ScheduledEvent
from bridge.events.record import EventHistory, Evidence, Transition, TransitionRecord, repeat_key
from bridge.events.transitions import (
    Step,
    classify_ending,
    classify_shown,
    incarnation_step,
    is_over,
    is_step_back,
    match_events,
)

AGREEING_RESPONSES = 5
LONG_CONFIRMATION_SECONDS = 300.0

_ABSENCE, _STEP_BACK = "absence", "step back"


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An unconfirmed change of a tracked event."""

    event: ScheduledEvent
    kind: str
    """``absence``, ``step back``, or the `repeat_key` of a repeated update."""
    ending: TransitionRecord | None
    """The ending that an absence proves. The first response without the event determines its evidence."""
    first: Instant
    is_long: bool
    shown_version: str
    """The api-version of the last response that showed the tracked event."""
    absent_version: str
    """The api-version of the responses that show the change."""
    count: int = 1

    @property
    def is_under_older_version(self) -> bool:
        return self.kind == _ABSENCE and self.absent_version < self.shown_version

    def is_confirmed(self, instant: Instant) -> bool:
        is_long = self.is_long or self.is_under_older_version
        return self.count >= AGREEING_RESPONSES and not (is_long and _is_recent(self.first, instant))


class _State(msgspec.Struct, frozen=True, kw_only=True):
    document: Document | None
    shown: Document | None
    """The last good response, or the stored document after a start."""
    good_at: Instant | None = None
    candidates: dict[int, _Candidate] = {}
    """Each candidate by the `id()` of its tracked event, because several events can have the same key."""
    came_back: dict[str, Instant] = {}
    """For each event key, the time at which the event was shown again after an absence."""
    turned_on: Instant | None = None
    """Time of the first good response after 24 hours without one."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one good response on the tracked document."""

    document: Document
    changes: tuple[TransitionRecord, ...]
    """Records without IDs: confirmed endings first, then the other changes in the order of the document."""
    active_event_ids: tuple[str, ...] | None
    is_news: bool
    """Whether the outbox must store the document and the changes."""
    state: _State


class DocumentTracker:
    """The tracked document, and the changes that are not confirmed yet.

    *document* and *last_good_at* come from the outbox. If the outbox is new, they are None. *history* returns the
    history of an event by its key. If this VM has booted since *last_good_at*, the boot was at *booted_at* or earlier.
    Otherwise, *booted_at* is None. If the agent was restarted, or if it received no good response for more than
    *gap_seconds*, it might have missed changes.
    """

    def __init__(
        self,
        document: Document | None,
        *,
        history: Callable[[str], EventHistory],
        last_good_at: datetime | None,
        gap_seconds: float,
        booted_at: datetime | None = None,
    ) -> None:
        self.gap_seconds = gap_seconds
        self._history = history
        self._stored_good_at = last_good_at
        self._booted_at = booted_at
        self._agreement = Agreement(is_needed=document is None)
        self._state = _State(document=document, shown=document)

    @property
    def document(self) -> Document | None:
        """Return the tracked document, which includes events with an unconfirmed absence."""
        return self._state.document

    @property
    def unconfirmed(self) -> frozenset[str]:
        """Return the keys of all events with an unconfirmed change.

        While a change is unconfirmed, the agent polls at least every second.
        """
        return frozenset(candidate.event.key for candidate in self._state.candidates.values())

    def active_event_ids(self, instant: Instant) -> tuple[str, ...] | None:
        """Return the sorted EventIds of the open events, or None if the open events are unknown."""
        state = self._state
        if state.document is None or state.good_at is None or instant.seconds_since(state.good_at) > self.gap_seconds:
            return None
        return listed_event_ids(state.document) if self._agreement.is_known(instant) else None

    def is_settled(self, instant: Instant) -> bool:
        """Return whether the outbox can store the last good time and the boot identity."""
        return not self._state.candidates and not _is_recent(self._state.turned_on, instant)

    def observe(
        self,
        document: Document,
        instant: Instant,
        *,
        vm_name: str | None = None,
        approved: frozenset[str] = frozenset(),
    ) -> Update | None:
        """Return the effect of *document*, a good response, or None if nothing changed.

        *approved* contains the keys of the events that this agent approved. Store the returned update in the outbox
        before you call `commit`.
        """
        state = self._state
        seconds = self._seconds_since_good(instant)
        has_gap = state.good_at is None or seconds > self.gap_seconds
        if document is state.shown and not (state.candidates or has_gap):
            self._state = msgspec.structs.replace(state, good_at=instant)
            return None
        self._agreement.note(document, instant)
        step = Step(
            before=state.shown,
            after=document,
            observed_at=instant.wall,
            has_gap=has_gap,
            seconds_since_good=seconds,
            booted_at=self._booted_at if state.good_at is None else None,
            vm_name=vm_name,
            approved=approved,
        )
        turned_on = instant if seconds >= SERVICE_OFF_AFTER_SECONDS else state.turned_on
        return self._apply(step, instant, turned_on=turned_on)

    def commit(self, update: Update) -> None:
        """Apply *update*. Call this method only after *update* is stored in the outbox."""
        self._state = update.state

    def _seconds_since_good(self, instant: Instant) -> float:
        if self._state.good_at is not None:
            return instant.seconds_since(self._state.good_at)
        if self._state.document is None:
            return 0.0
        if self._stored_good_at is None:
            return SERVICE_OFF_AFTER_SECONDS
        return max((instant.wall - self._stored_good_at).total_seconds(), 0.0)

    def _apply(self, step: Step, instant: Instant, *, turned_on: Instant | None) -> Update:
        before = self._state.document or Document()
        pairs, vanished = match_events(before.events, step.after.events)
        state = msgspec.structs.replace(
            self._state,
            shown=step.after,
            good_at=instant,
            came_back=self._came_back(pairs, instant),
            turned_on=turned_on,
        )
        candidates: list[_Candidate] = []
        events: list[ScheduledEvent] = []
        endings: list[TransitionRecord] = []
        changes: list[TransitionRecord] = []
        for was, now in pairs:
            change = classify_shown(self._in_version(was, now, step.after), now, step)
            if was is not None and change is not None and (kind := self._kind(was, now, change.transition)) is not None:
                candidate = self._candidate(state, was, kind, instant)
                if not candidate.is_confirmed(instant):
                    candidates.append(candidate)
                    events.append(was)
                    continue
            events.append(now)
            if change is not None:
                changes.append(change)
        for was in vanished:
            candidate = self._candidate(state, was, _ABSENCE, instant, ending=self._ending(was, state, step))
            if not candidate.is_confirmed(instant):
                candidates.append(candidate)
                events.append(was)
            elif candidate.ending is not None:
                is_inferred = candidate.is_under_older_version
                ending = candidate.ending
                endings.append(msgspec.structs.replace(ending, evidence=Evidence.INFERRED) if is_inferred else ending)
        is_changed = bool(endings or changes) or len(before.events) != len(events)
        rise = incarnation_step(before, step.after)
        # While an event is absent, keep its last incarnation, which can prove a cancellation after a restart. Do not
        # store a lower incarnation alone, because alternating front ends would then cause a write at each poll.
        keeps_incarnation = bool(candidates) or not (is_changed or rise is None or rise >= 0)
        document = step.after
        if keeps_incarnation:
            version = max(before.api_version, step.after.api_version)
            document = Document(api_version=version, incarnation=before.incarnation, events=tuple(events))
        has_other_incarnation = bool(events) and before != msgspec.structs.replace(document, events=before.events)
        return Update(
            document=document,
            changes=(*endings, *changes),
            active_event_ids=listed_event_ids(document) if self._agreement.is_known(instant) else None,
            is_news=self._state.document is None or is_changed or has_other_incarnation,
            state=msgspec.structs.replace(
                state, document=document, candidates={id(candidate.event): candidate for candidate in candidates}
            ),
        )

    def _candidate(
        self,
        state: _State,
        event: ScheduledEvent,
        kind: str,
        instant: Instant,
        *,
        ending: TransitionRecord | None = None,
    ) -> _Candidate:
        version = (state.shown or Document()).api_version
        last = state.candidates.get(id(event))
        if last is not None and last.kind == kind and last.absent_version == version:
            return msgspec.structs.replace(last, count=last.count + 1)
        is_long = _is_recent(state.came_back.get(event.key), instant) or _is_recent(state.turned_on, instant)
        is_update = kind not in {_ABSENCE, _STEP_BACK}
        return _Candidate(
            event=event,
            kind=kind,
            ending=ending,
            first=instant,
            is_long=is_long and not is_update,
            shown_version=self._shown_version(event),
            absent_version=version,
        )

    def _shown_version(self, was: ScheduledEvent) -> str:
        state = self._state
        candidate = state.candidates.get(id(was))
        return candidate.shown_version if candidate is not None else (state.shown or Document()).api_version

    def _in_version(self, was: ScheduledEvent | None, now: ScheduledEvent, after: Document) -> ScheduledEvent | None:
        """Return *was* with the `extra` of *now* if the two have different api-versions."""
        if was is None or was.extra == now.extra or self._shown_version(was) == after.api_version:
            return was
        return msgspec.structs.replace(was, extra=now.extra)

    def _kind(self, was: ScheduledEvent, now: ScheduledEvent, transition: Transition) -> str | None:
        if is_step_back(was, now):
            return _STEP_BACK
        key = repeat_key(transition, now)
        return key if transition is Transition.UPDATED and key in self._history(now.key).counts else None

    def _ending(self, event: ScheduledEvent, state: _State, step: Step) -> TransitionRecord | None:
        if is_over(event):
            return None
        was_started = self._history(event.key).was_started
        return classify_ending(event, step, was_started=was_started, came_back=event.key in state.came_back)

    def _came_back(
        self, pairs: Iterable[tuple[ScheduledEvent | None, ScheduledEvent]], instant: Instant
    ) -> dict[str, Instant]:
        state = self._state
        tracked = {event.key for event in (state.document or Document()).events}
        absent = {candidate.event.key for candidate in state.candidates.values() if candidate.kind == _ABSENCE}
        came_back = {key: since for key, since in state.came_back.items() if key in tracked}
        for was, now in pairs:
            if now.key in absent or (was is None and self._history(now.key).has_ended):
                came_back[now.key] = instant
        return came_back


def _is_recent(since: Instant | None, instant: Instant) -> bool:
    return since is not None and instant.monotonic - since.monotonic < LONG_CONFIRMATION_SECONDS
