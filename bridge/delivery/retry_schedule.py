"""Decides when a sink retries, and which records it tries next.

`bridge.backoff.delivery_gap` returns the delay between two attempts. In addition, these rules apply:

- A `Retry-After` header sets a minimum delay for the whole sink, except for Preempt and Terminate events.
- The delay of a Preempt or Terminate event is at most 2 s, but a send in progress can extend it.
- After status 410, the agent sends nothing, not even Preempt and Terminate events, until a restart or `outbox retry`.

If a send fails, the agent delays only records of the same event. If two sends in a row fail for different events, the
destination is probably down, so the agent pauses the sink. A `Retry-After` header or status 410 pauses the sink
immediately.

While a sink is paused, the agent sends it one record at a time. Preempt and Terminate events have a separate retry
timer. When the destination accepts or permanently rejects a record, the pause and any `Retry-After` delay end, and all
pending records become due.

An event that always fails must not block other events. After a failed send, the agent therefore tries a record of
another event. During a pause, it tries the event with the fewest attempts.

Callers pass the current time in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import partial

import msgspec

from bridge.backoff import (
    MINIMUM_DELAY_SECONDS,
    RETRY_AFTER_CAP_SECONDS,
    URGENT_CAP_SECONDS,
    delivery_cap,
    delivery_gap,
)

_NEVER = float("inf")
_LONG_AGO = float("-inf")


class SendMode(Enum):
    """The records that the worker may send now."""

    ALL = "all"
    """The sink is not paused. The worker sends all due records."""
    FRESH = "fresh"
    """The sink is paused. The worker sends the first record of an event that has a new record."""
    PROBE = "probe"
    """The sink is paused. The worker sends one record, and skips urgent events that have failed."""
    URGENT = "urgent"
    """The sink is paused. The worker sends one urgent record."""
    WAIT = "wait"
    """The worker sends no record until `RetrySchedule.next_at`."""


class FailedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event with a record in a batch that failed."""

    event_key: str
    urgent: bool
    seconds_to_not_before: float | None
    """The time until NotBefore; None if NotBefore is unknown or has passed."""


class _Delay(msgspec.Struct, kw_only=True):
    since: float
    attempts: int = 0
    until: float = _LONG_AGO
    urgent: bool = False
    was_released: bool = False
    """True after a response to another event's records has made this event due early."""


class RetrySchedule:
    """The retry state of one sink. *random* returns a number in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._gap = partial(delivery_gap, random=random)
        self._delays: dict[str, _Delay] = {}
        self._last_failed: frozenset[str] = frozenset()
        self._failing_since = _NEVER
        self._probes = 0
        self._probe_at: float | None = None
        self._bound_until = _LONG_AGO
        self._urgent_at = _NEVER
        self._urgent_was_last = False
        self._fresh: dict[str, None] = {}
        self.is_gone = False
        """True after status 410. The agent then sends nothing until a restart or `outbox retry`."""

    @property
    def is_paused(self) -> bool:
        """Return whether the sink is paused, so that the agent sends it one record at a time."""
        return self._probe_at is not None

    @property
    def is_troubled(self) -> bool:
        """Return whether a delay is in effect. If so, the worker must call `record_arrived`."""
        return self._probe_at is not None or bool(self._delays)

    @property
    def last_send_failed(self) -> bool:
        """Return whether the last send failed. The next send should then be for another event."""
        return self._probe_at is None and bool(self._last_failed)

    @property
    def failing_events(self) -> Collection[str]:
        """Return the keys of the events whose last send failed."""
        return self._delays.keys()

    def blocked(self, now: float) -> Collection[str]:
        """Return the keys of the failing events that must still wait."""
        return {key for key, delay in self._delays.items() if delay.until > now}

    @property
    def urgent_failing(self) -> Collection[str]:
        """Return the keys of the failing events that are urgent."""
        return {key for key, delay in self._delays.items() if delay.urgent}

    def urgent_blocked(self, now: float) -> Collection[str]:
        """Return the keys of the urgent failing events, except the event to retry next."""
        return set(self.urgent_failing) - {self._longest_due_urgent(now)}

    def _longest_due_urgent(self, now: float) -> str | None:
        due = [(delay.until, key) for key, delay in self._delays.items() if delay.urgent and delay.until <= now]
        return min(due)[1] if due else None

    def mode(self, now: float) -> SendMode:
        """Return which records the worker can send at *now*."""
        if self.is_gone:
            return SendMode.WAIT
        if self._probe_at is None:
            return SendMode.ALL
        is_other_due = now >= self._other_at(self._probe_at)
        if now >= self._urgent_at and not (is_other_due and self._urgent_was_last):
            return SendMode.URGENT
        if is_other_due:
            return SendMode.FRESH if self._fresh else SendMode.PROBE
        return SendMode.WAIT

    def next_at(self) -> float:
        """Return when `mode` or `blocked` next changes, or infinity without a new record."""
        if self.is_gone:
            return _NEVER
        if self._probe_at is None:
            return min((delay.until for delay in self._delays.values()), default=_NEVER)
        return min(self._urgent_at, self._other_at(self._probe_at))

    def _other_at(self, probe_at: float) -> float:
        return max(self._bound_until, _LONG_AGO if self._fresh else probe_at)

    # Events.

    def record_arrived(
        self, event_key: str, now: float, *, urgent: bool, seconds_to_not_before: float | None = None
    ) -> None:
        """End the delay of an event that has a new record.

        A Retry-After delay remains in force, except for urgent events.
        """
        delay = self._delays.get(event_key)
        if delay is not None:
            delay.until = _LONG_AGO
            delay.urgent = delay.urgent or urgent
        if self._probe_at is None:
            return
        self._bring_probe_forward(now, seconds_to_not_before)  # takes effect after any Retry-After delay
        if urgent:
            self._urgent_at = _LONG_AGO
        elif now >= self._bound_until:
            self._fresh[event_key] = None

    def take_fresh(self) -> str:
        """Return the event to try in the mode FRESH. Its record then no longer counts as new."""
        event_key = next(iter(self._fresh))
        del self._fresh[event_key]
        return event_key

    def nothing_pending(self, mode: SendMode, now: float) -> None:
        """Note that no pending row matches *mode*."""
        if mode is SendMode.ALL:
            for event_key in [key for key, delay in self._delays.items() if delay.until <= now]:
                del self._delays[event_key]
        elif mode is SendMode.URGENT:
            due = self._longest_due_urgent(now)
            if due is not None:
                del self._delays[due]
            self._urgent_at = min((each.until for each in self._delays.values() if each.urgent), default=_NEVER)
        elif mode is SendMode.PROBE and not self.urgent_failing:
            self.resume()
        elif mode is SendMode.PROBE:
            self._probe_at = now + self._gap(self._probes, outage_seconds=0.0)

    def succeeded(self, event_keys: Iterable[str]) -> None:
        """End the sink's pause, because the destination has responded.

        All other failing events also become due immediately, but each of them gets only one such early retry.
        """
        self.needed_no_request(event_keys)
        self._last_failed, self._failing_since = frozenset(), _NEVER
        if self._probe_at is not None:
            self.resume()
        for delay in self._delays.values():
            if not delay.was_released:
                delay.until, delay.was_released = _LONG_AGO, True

    def needed_no_request(self, event_keys: Iterable[str]) -> None:
        """Clear the retry delays of events whose records the sink handled without a request."""
        for event_key in event_keys:
            self._delays.pop(event_key, None)

    def resume(self) -> None:
        """End the pause, even one caused by status 410, and make all records due immediately."""
        self._probe_at, self._bound_until, self._urgent_at = None, _LONG_AGO, _NEVER
        self._last_failed, self._failing_since = frozenset(), _NEVER
        self._probes = 0
        self._fresh.clear()
        self.is_gone = False
        for delay in self._delays.values():
            delay.until = _LONG_AGO

    def failed(
        self,
        events: Sequence[FailedEvent],
        now: float,
        *,
        during: SendMode,
        has_urgent: bool,
        seconds_to_notice: float | None,
        retry_after: float | None = None,
        is_gone: bool = False,
    ) -> None:
        """Note that a send in the mode *during* failed.

        *has_urgent* is True if an urgent record is pending. *seconds_to_notice* is the time until the earliest future
        NotBefore of all pending records. *is_gone* is True if the response status was 410.
        """
        self._failing_since = min(self._failing_since, now)
        for event in events:
            self._delay(event, now, retry_after)
        keys = frozenset(event.event_key for event in events)
        is_another = bool(self._last_failed) and not keys <= self._last_failed
        self._last_failed = keys
        self.is_gone = self.is_gone or is_gone
        binds_seconds = max(retry_after or 0.0, 0.0)
        if binds_seconds > 0:
            self._bound_until = max(self._bound_until, now + min(binds_seconds, RETRY_AFTER_CAP_SECONDS))
            self._fresh.clear()
        if self._probe_at is not None or is_another or binds_seconds > 0 or is_gone:
            self._pause(now, during, seconds_to_notice)
            self._set_urgent(now, during, has_urgent=has_urgent)

    def _pause(self, now: float, during: SendMode, seconds_to_notice: float | None) -> None:
        if self._probe_at is None or during is SendMode.PROBE:
            self._probes += 1
            outage_seconds = self._outage_seconds(now)
            gap = self._gap(self._probes, seconds_to_not_before=seconds_to_notice, outage_seconds=outage_seconds)
            self._probe_at = now + gap
        else:
            self._bring_probe_forward(now, seconds_to_notice)

    def _bring_probe_forward(self, now: float, seconds_to_notice: float | None) -> None:
        if self._probe_at is not None:
            cap = delivery_cap(seconds_to_notice, outage_seconds=self._outage_seconds(now))
            self._probe_at = min(self._probe_at, now + cap)

    def _outage_seconds(self, now: float) -> float:
        return max(now - self._failing_since, 0.0)

    def _set_urgent(self, now: float, during: SendMode, *, has_urgent: bool) -> None:
        self._urgent_was_last = during is SendMode.URGENT
        planned_at = _NEVER if self._urgent_was_last else self._urgent_at
        # Send again soon, because the next urgent record may be untried. The minimum delay limits the rate.
        self._urgent_at = min(planned_at, now + MINIMUM_DELAY_SECONDS) if has_urgent else _NEVER

    def _delay(self, event: FailedEvent, now: float, retry_after: float | None) -> None:
        delay = self._delays.get(event.event_key)
        if delay is None:
            delay = self._delays[event.event_key] = _Delay(since=now)
        delay.attempts += 1
        delay.urgent = event.urgent
        gap = self._gap(
            delay.attempts,
            seconds_to_not_before=event.seconds_to_not_before,
            outage_seconds=now - delay.since,
            retry_after=retry_after,
            urgent=event.urgent,
        )
        if event.urgent:
            # Urgent events are sent one by one, so leave time for the others.
            queue_seconds = MINIMUM_DELAY_SECONDS * len(self.urgent_failing)
            gap = max(min(gap, URGENT_CAP_SECONDS - queue_seconds), MINIMUM_DELAY_SECONDS)
        delay.until = now + gap
