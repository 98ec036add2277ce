"""When one sink is tried next: the memory between its failures, without a clock or a peer.

Two kinds of trouble look alike at first. A record that its destination does not like delays only its own event. A
destination that is down fails whatever comes: two failures in a row on different events mean that, and then the sink is
paused and probed with one record at a time, so that a thousand records do not knock at a dead door. Any answer about
a record ends the pause and makes all rows due.

The agent's promise to a VM about to be evicted is kept here: while a Preempt or Terminate waits, a pause never lasts
longer than 2 s, whatever the peer's Retry-After says.

Times are seconds on one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

import msgspec

from bridge.backoff import RETRY_AFTER_CAP_SECONDS, URGENT_CAP_SECONDS, delivery_gap


class Turn(Enum):
    """What the worker may do now."""

    ALL = "all"
    """Send whatever is due."""
    FRESH = "fresh"
    """Paused: try the events that something new arrived for, once."""
    PROBE = "probe"
    """Paused: try one record."""
    URGENT = "urgent"
    """Bound by a Retry-After: try one urgent record, nothing else."""
    WAIT = "wait"
    """Nothing, until `Schedule.next_at`."""


class _Delay(msgspec.Struct):
    attempts: int
    until: float


class Schedule:
    """The retry state of one sink; *random* returns a number in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._delays: dict[str, _Delay] = {}
        self._failed_event: str | None = None
        self._failures = 0
        self._probe_at: float | None = None
        self._bound_until = float("-inf")
        self._tried_at = float("-inf")
        self._fresh: dict[str, None] = {}
        self.is_held = False
        """The peer is gone (410): nothing is tried until a restart or a person's retry."""

    @property
    def is_paused(self) -> bool:
        """Return whether the sink is probed instead of sent to."""
        return self._probe_at is not None

    @property
    def is_troubled(self) -> bool:
        """Return whether anything is delayed, so that it matters which rows are new."""
        return self._probe_at is not None or bool(self._delays)

    @property
    def fresh(self) -> Collection[str]:
        """The keys of the events that something new arrived for during the pause."""
        return self._fresh.keys()

    def blocked(self, now: float) -> Collection[str]:
        """Return the keys of the events that are delayed on their own."""
        return [key for key, delay in self._delays.items() if delay.until > now]

    def turn(self, now: float, *, owes_urgent: bool) -> Turn:
        """Return what may be done at *now*."""
        if self.is_held:
            return Turn.WAIT
        if now < self._bound_until:
            return Turn.URGENT if owes_urgent and now >= self._tried_at + URGENT_CAP_SECONDS else Turn.WAIT
        if self._probe_at is None:
            return Turn.ALL
        if self._fresh:
            return Turn.FRESH
        return Turn.PROBE if now >= self._probe_at else Turn.WAIT

    def next_at(self, *, owes_urgent: bool) -> float:
        """Return when `turn` or `blocked` may say something else; infinity when only news can change it."""
        if self.is_held:
            return float("inf")
        moments = [delay.until for delay in self._delays.values()]
        if self._probe_at is not None:
            moments = [max(self._probe_at, self._bound_until)]
            if owes_urgent:
                moments.append(self._tried_at + URGENT_CAP_SECONDS)
        return min(moments, default=float("inf"))

    def arrived(self, event_key: str) -> None:
        """Note a new record: its event is tried once at once, unless a Retry-After binds the sink."""
        if self._probe_at is not None:
            self._fresh[event_key] = None
        elif event_key in self._delays:
            self._delays[event_key].until = float("-inf")

    def arrival_was_tried(self, event_key: str) -> None:
        """Forget that something new arrived for *event_key*."""
        self._fresh.pop(event_key, None)

    def answered(self, event_key: str) -> None:
        """Note that the destination took a record, or refused it for good: it is there."""
        self._delays.pop(event_key, None)
        self._failed_event = None
        self._failures = 0
        if self._probe_at is not None:
            self.resume()

    def resume(self) -> None:
        """Make every row due: the sink answered, or a person asked for it."""
        self._probe_at, self._bound_until, self.is_held = None, float("-inf"), False
        self._failures = 0
        self._fresh.clear()
        for delay in self._delays.values():
            delay.until = float("-inf")

    def failed(
        self,
        event_key: str,
        now: float,
        *,
        urgent: bool,
        seconds_to_not_before: float | None,
        retry_after: float | None = None,
        held: bool = False,
    ) -> bool:
        """Note a failure; return whether the sink is paused now, so that `pause` has to be told how urgent it is."""
        delay = self._delays.setdefault(event_key, _Delay(attempts=0, until=now))
        delay.attempts += 1
        delay.until = now + self._gap(delay.attempts, seconds_to_not_before, retry_after, urgent=urgent)
        is_another = self._failed_event not in (None, event_key)
        self._failed_event, self._tried_at = event_key, now
        self._failures += 1
        self.is_held = held
        if retry_after is not None:
            self._bound_until = max(self._bound_until, now + min(retry_after, RETRY_AFTER_CAP_SECONDS))
        return held or retry_after is not None or is_another or self._probe_at is not None

    def pause(self, now: float, *, owes_urgent: bool, seconds_to_notice: float | None) -> None:
        """Pause until the next probe; *seconds_to_notice* is the time to the soonest NotBefore ahead."""
        self._probe_at = now + self._gap(self._failures, seconds_to_notice, None, urgent=owes_urgent)

    def forget_past(self, now: float) -> None:
        """Drop the delays that are over: nothing is owed for their events any more."""
        for key in [key for key, delay in self._delays.items() if delay.until <= now]:
            del self._delays[key]

    def _gap(
        self, attempts: int, seconds_to_not_before: float | None, retry_after: float | None, *, urgent: bool
    ) -> float:
        return delivery_gap(
            attempts,
            seconds_to_not_before=seconds_to_not_before,
            urgent=urgent,
            retry_after=retry_after,
            random=self._random,
        )
