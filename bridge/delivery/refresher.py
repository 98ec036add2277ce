"""Selects the records to send again to a sink whose destination loses its alerts on a restart.

The host sends the newest record of each active event again, *every_seconds* after its delivery or its last refresh and
under the same ID. The first refresh waits for a good document of this run, because an event that was active before may
have ended. A refresh is no delivery, so nothing is stored.

A refresh that fails is tried again with growing gaps of at most one interval. Records go first, and a refresh waits
while the sink is paused. Each agent has its own interval, up to a tenth shorter than configured, because an
announcement reaches every VM of a fleet in the same second.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge.backoff import delivery_gap
from bridge.clock import Clock
from bridge.events.record import TransitionRecord
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import RecordRow
from bridge.outbox.state import State

_NEVER = float("inf")
_AT_ONCE = float("-inf")
_TICK_SECONDS = 1.0
_SPREAD_SHARE = 0.1


class Refresher:
    """Selects the refreshes of *sink*; an interval of None: no refreshes. For one thread.

    *has_seen_document* returns whether this run had a good document and stored its changes.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        sink: str,
        every_seconds: float | None,
        clock: Clock,
        has_seen_document: Callable[[], bool],
    ) -> None:
        self._outbox = outbox
        self._sink = sink
        self._every_seconds = None if every_seconds is None else every_seconds * (1 - _SPREAD_SHARE * clock.random())
        self._clock = clock
        self._has_seen_document = has_seen_document
        self._sent_at: dict[str, float] = {}
        """By event key, the time of the last refresh, in monotonic seconds."""
        self._tried_at: dict[str, float] = {}
        """By event key, the time of the last refresh that failed."""
        self._chosen = ""
        self._failures = 0
        self.next_at = _NEVER if every_seconds is None else _AT_ONCE
        """When there may be a record to send, in monotonic seconds."""

    @property
    def is_failing(self) -> bool:
        """Return whether the last refresh failed."""
        return self._failures > 0

    def next(self, now: float) -> TransitionRecord | None:
        """Return the record to send again at *now*, None for none."""
        if self._every_seconds is None or now < self.next_at:
            return None
        if not (self._outbox.is_trusted and self._has_seen_document()):
            self.next_at = now + _TICK_SECONDS
            return None
        wall = self._clock.timestamp()
        found = self._outbox.read(_accepted, self._sink)
        ages = {row.event_key: wall - accepted_at for row, accepted_at in found}
        due_at = {key: self._last_sent_at(key, age, now) + self._every_seconds for key, age in ages.items()}
        self._sent_at = {key: at for key, at in self._sent_at.items() if key in ages}
        self._tried_at = {key: at for key, at in self._tried_at.items() if key in ages}
        due = [row for row, _ in found if due_at[row.event_key] <= now]
        if not due:
            self._failures = 0
            self.next_at = min([now + self._every_seconds, *due_at.values()])
            return None
        chosen = min(due, key=lambda row: (self._tried_at.get(row.event_key, _AT_ONCE), due_at[row.event_key]))
        self._chosen = chosen.event_key
        return chosen.record

    def _last_sent_at(self, event_key: str, age_seconds: float, now: float) -> float:
        """Return the time of the last delivery, *age_seconds* ago, or of a later refresh."""
        # A negative age means that the wall clock was set back.
        accepted_at = now - age_seconds if age_seconds >= 0 else _AT_ONCE
        return max(self._sent_at.get(event_key, _AT_ONCE), accepted_at)

    def succeeded(self, now: float) -> None:
        """Note that the destination accepted the record of the last `next`, or rejected it permanently."""
        self._sent_at[self._chosen] = now
        self._failures = 0
        self.next_at = now

    def failed(self, now: float) -> None:
        """Note that the destination did not accept the record of the last `next` for now."""
        self._tried_at[self._chosen] = now
        self._failures += 1
        gap = delivery_gap(
            self._failures, seconds_to_not_before=None, urgent=False, retry_after=None, random=self._clock.random
        )
        self.next_at = now + min(gap, self._every_seconds or gap)


def _accepted(state: State, sink: str) -> list[tuple[RecordRow, float]]:
    """Return the records to send again, with the time when *sink* accepted each of them."""
    records = deliveries.current_records(state, sink)
    return [(row, state.deliveries.rows[row.sequence, sink].changed_at) for row in records]
