"""The retry schedule of one sink: when it is tried next after a failure, and with what. Pure: times come in.

Two kinds of trouble look alike at first. A record that its destination does not like delays only its own event. A
destination that is down fails whatever comes: two failures in a row on different events mean that, and then the sink is
paused and probed with one record at a time: a thousand requests would not help it. Any answer about a record ends the
pause and makes all rows due.

So that a few events which always fail cannot keep the rest from going, the batcher

- sends something of another event after a failure, if there is anything (`last_send_failed`, `failing_events`): two
  failures in a row then mean the destination,
- probes with the record tried least, not with the same one again, and
- alternates between urgent records and all others when it probes.

An answer also releases an event that failed before it, once: what failed may have been the destination. An event that
fails again after such an answer fails on its own account, and only its own delay, or the end of a pause, makes it due.

While the NotBefore of any pending record is ahead, a gap is at most 15 s, that between two probes included: the probe
that gets through makes that record due, whichever event it was of.

A Preempt or Terminate has a timer of its own, of at most 2 s, whatever the pause or the peer's Retry-After ask for: the
VM will be gone.

Times are seconds on one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum

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
    """What may be sent now."""

    ALL = "all"
    """Whatever is due."""
    FRESH = "fresh"
    """Paused: the first record of an event that has a new record."""
    PROBE = "probe"
    """Paused: one record, not of an urgent event that was tried (those have a timer of their own)."""
    URGENT = "urgent"
    """Paused: one urgent record, nothing else."""
    WAIT = "wait"
    """Nothing, until `RetrySchedule.next_at`."""


class FailedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a batch that failed."""

    event_key: str
    urgent: bool
    seconds_to_not_before: float | None
    """None when it is unknown or has passed."""


class _Delay(msgspec.Struct, kw_only=True):
    attempts: int = 0
    until: float = _LONG_AGO
    tried_at: float = _LONG_AGO
    urgent: bool = False
    answers_before: int = 0
    """How many answers the sink had given when this event failed last."""
    is_its_own: bool = False
    """The event failed again after an answer about another: the destination is not to blame."""


class RetrySchedule:
    """The retry state of one sink; *random* returns a number in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._delays: dict[str, _Delay] = {}
        self._last_failed: frozenset[str] = frozenset()
        self._answers = 0
        self._has_unreleased = False
        self._probes = 0
        self._probe_at: float | None = None
        self._bound_until = _LONG_AGO
        self._urgent_at = _NEVER
        self._urgent_was_last = False
        self._fresh: dict[str, None] = {}
        self.is_gone = False
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
    def last_send_failed(self) -> bool:
        """Return whether the last send failed: what is sent next should be of an event that never did."""
        return self._probe_at is None and bool(self._last_failed)

    @property
    def failing_events(self) -> Collection[str]:
        """The keys of the events that failed and were not answered since."""
        return self._delays.keys()

    def blocked(self, now: float) -> Collection[str]:
        """Return the keys of the events that are delayed on their own."""
        return [key for key, delay in self._delays.items() if delay.until > now]

    @property
    def urgent_failing(self) -> Collection[str]:
        """The keys of the failing events that are urgent."""
        return [key for key, delay in self._delays.items() if delay.urgent]

    def urgent_blocked(self, now: float) -> Collection[str]:
        """Return the keys of the urgent failing events but for the one that is due for longest."""
        due = self._longest_due_urgent(now)
        return [key for key in self.urgent_failing if key != due]

    def _longest_due_urgent(self, now: float) -> str | None:
        due = [(delay.until, key) for key, delay in self._delays.items() if delay.urgent and delay.until <= now]
        return min(due)[1] if due else None

    def next_expiry(self, now: float) -> float:
        """Return when the next delay of an event ends; infinity when none is to come."""
        return min((delay.until for delay in self._delays.values() if delay.until > now), default=_NEVER)

    def mode(self, now: float) -> SendMode:
        """Return what may be sent at *now*."""
        if self.is_gone:
            return SendMode.WAIT
        if self._probe_at is None:
            return SendMode.ALL
        is_other_due = now >= self._other_at()
        if now >= self._urgent_at and not (is_other_due and self._urgent_was_last):
            return SendMode.URGENT
        if is_other_due:
            return SendMode.FRESH if self._fresh else SendMode.PROBE
        return SendMode.WAIT

    def next_at(self) -> float:
        """Return when `mode` or `blocked` may change; infinity when only a new record can change them."""
        if self.is_gone:
            return _NEVER
        if self._probe_at is None:
            return min((delay.until for delay in self._delays.values()), default=_NEVER)
        return min(self._urgent_at, self._other_at())

    def _other_at(self) -> float:
        assert self._probe_at is not None  # noqa: S101  # only asked in a pause; told to the type checker
        return max(self._bound_until, _LONG_AGO if self._fresh else self._probe_at)

    # What happened.

    def record_arrived(
        self, event_key: str, now: float, *, urgent: bool, seconds_to_not_before: float | None = None
    ) -> None:
        """Note a new record: its event is tried once at once, unless a Retry-After binds the sink."""
        delay = self._delays.get(event_key)
        if delay is not None:
            delay.until = _LONG_AGO
            delay.urgent = delay.urgent or urgent
        if self._probe_at is None:
            return
        self._bring_probe_forward(now, seconds_to_not_before)  # for the end of a Retry-After
        if urgent:
            self._urgent_at = _LONG_AGO
        elif now >= self._bound_until:
            self._fresh[event_key] = None

    def take_fresh(self) -> str:
        """Return the event to try in FRESH mode, and forget that it has a new record."""
        event_key = next(iter(self._fresh))
        del self._fresh[event_key]
        return event_key

    def nothing_pending(self, mode: SendMode, now: float) -> None:
        """Note that there is no row which *mode* may send."""
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
            self._probe_at = now + self._gap(self._probes, None)

    def succeeded(self, event_keys: Iterable[str]) -> bool:
        """Note that the destination took records, or refused them for good: it is there.

        Return whether that made anything else due.
        """
        for event_key in event_keys:
            self._delays.pop(event_key, None)
        self._last_failed = frozenset()
        self._answers += 1
        if self._probe_at is not None:
            self.resume()
            return True
        if not self._has_unreleased:
            return False
        self._has_unreleased = False
        released = [delay for delay in self._delays.values() if not delay.is_its_own]
        for delay in released:
            delay.until = _LONG_AGO
        return bool(released)

    def needed_no_request(self, event_keys: Iterable[str]) -> None:
        """Note that the sink had nothing to send of these events: that tells nothing of the destination."""
        for event_key in event_keys:
            self._delays.pop(event_key, None)

    def resume(self) -> None:
        """Make every row due: the sink answered, or a person asked for it."""
        self._probe_at, self._bound_until, self._urgent_at = None, _LONG_AGO, _NEVER
        self._last_failed = frozenset()
        self._probes = 0
        self._fresh.clear()
        self._has_unreleased = self.is_gone = False
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
        """Note that a send failed that was made in the mode *during*.

        *has_urgent*: an urgent record is pending for the sink. *seconds_to_notice*: the time to the soonest NotBefore
        ahead of all that are pending. *is_gone*: the peer answered 410.
        """
        for event in events:
            self._delay(event, now, retry_after)
        keys = frozenset(event.event_key for event in events)
        is_another = bool(self._last_failed) and not keys <= self._last_failed
        self._last_failed = keys
        self._has_unreleased = True
        self.is_gone = self.is_gone or is_gone
        binds = retry_after is not None and retry_after > 0
        if binds and retry_after is not None:
            self._bound_until = max(self._bound_until, now + min(retry_after, RETRY_AFTER_CAP_SECONDS))
            self._fresh.clear()
        if self._probe_at is not None or is_another or binds or is_gone:
            self._pause(now, during, seconds_to_notice)
            self._set_urgent(now, during, has_urgent=has_urgent)

    def _pause(self, now: float, during: SendMode, seconds_to_notice: float | None) -> None:
        """Set the time of the next probe; a try out of turn does not put it off."""
        if self._probe_at is None or during is SendMode.PROBE:
            self._probes += 1
            self._probe_at = now + self._gap(self._probes, seconds_to_notice)
        else:
            self._bring_probe_forward(now, seconds_to_notice)

    def _bring_probe_forward(self, now: float, seconds_to_notice: float | None) -> None:
        if self._probe_at is not None:
            self._probe_at = min(self._probe_at, now + delivery_cap(seconds_to_notice))

    def _set_urgent(self, now: float, during: SendMode, *, has_urgent: bool) -> None:
        self._urgent_was_last = during is SendMode.URGENT
        # The next one soon, it may not have been tried at all; but not a hundred of them at once.
        soon = min(now + MINIMUM_DELAY_SECONDS, self._urgent_deadline())
        if not has_urgent:
            self._urgent_at = _NEVER
        elif during in {SendMode.FRESH, SendMode.PROBE}:
            self._urgent_at = min(self._urgent_at, soon)
        else:
            self._urgent_at = soon

    def _urgent_deadline(self) -> float:
        """Return when the first of the urgent failing events has waited as long as it may."""
        tried = (delay.tried_at for delay in self._delays.values() if delay.urgent)
        return min(tried, default=_NEVER) + URGENT_CAP_SECONDS

    def _delay(self, event: FailedEvent, now: float, retry_after: float | None) -> None:
        delay = self._delays.get(event.event_key)
        if delay is None:
            delay = self._delays[event.event_key] = _Delay()
        elif self._answers > delay.answers_before:
            delay.is_its_own = True
        delay.attempts += 1
        delay.answers_before = self._answers
        delay.urgent = event.urgent
        gap = self._gap(delay.attempts, event.seconds_to_not_before, retry_after=retry_after, urgent=event.urgent)
        if event.urgent:
            # The urgent ones wait for one another; that counts into the 2 s.
            queue_seconds = MINIMUM_DELAY_SECONDS * len(self.urgent_failing)
            gap = max(min(gap, URGENT_CAP_SECONDS - queue_seconds), MINIMUM_DELAY_SECONDS)
        delay.tried_at, delay.until = now, now + gap

    def _gap(
        self,
        attempts: int,
        seconds_to_not_before: float | None,
        *,
        retry_after: float | None = None,
        urgent: bool = False,
    ) -> float:
        return delivery_gap(
            attempts,
            seconds_to_not_before=seconds_to_not_before,
            urgent=urgent,
            retry_after=retry_after,
            random=self._random,
        )
