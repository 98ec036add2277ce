"""The refresher: which record of an active event is due to be sent again, for a sink whose destination forgets.

Each active event has a time of its own: so many seconds after it was last told, by a delivery or by a refresh. After a
restart of the agent the time of the delivery counts, so what is due is told at once: the destination may have been
restarted meanwhile. But not before the document was seen since: what was active may be over. Right before each send
the outbox is asked whether the event is still active and nothing newer of it is pending. Nothing is written: a refresh
is no new delivery, and what is due follows from what is stored.

A refresh that fails is tried again with growing gaps, which end at the refresh time itself; others take their turn
first. It hardly delays a record: records go first, a refresh waits while the sink is paused, and one that has no answer
after half a second is cut as soon as there is something new.

Each agent has a refresh time of its own, up to a tenth shorter than the configured one: an announcement reaches every
VM of a fleet in the same second, and they shall not all tell it again in the same second for as long as it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bridge.backoff import delivery_gap
from bridge.clock import Clock
from bridge.outbox import refresh
from bridge.outbox.deliveries import PendingDelivery
from bridge.outbox.outbox import Outbox

_NEVER = float("inf")
_AT_ONCE = float("-inf")
#: How long the first document is waited for: the first answer may take two and a half minutes.
_FIRST_DOCUMENT_SECONDS = 180.0
_TICK_SECONDS = 0.25
_SPREAD_SHARE = 0.1


class Refresher:
    """Chooses what the sink called *sink* is told again, at least every *every_seconds*; None: nothing. For one thread.

    *has_seen_document*: whether this agent has had the document, and stored what it changed.
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
        self._began_at = clock.monotonic()
        self._told_at: dict[str, float] = {}
        """By event key, when it was told again last, in monotonic seconds."""
        self._due: deque[str] = deque()
        self._failures = 0
        self.next_at = _NEVER if every_seconds is None else _AT_ONCE
        """When there may be something to send, in monotonic seconds."""

    @property
    def is_failing(self) -> bool:
        """Return whether the last refresh failed."""
        return self._failures > 0

    def next(self, now: float) -> PendingDelivery | None:
        """Return the record to send again at *now*, None when none is due."""
        if self._every_seconds is None or now < self.next_at:
            return None
        if not self._due:
            self._read_due(now, self._every_seconds)
        if self._due and not self._may_tell(now):
            self.next_at = now + _TICK_SECONDS
            return None
        while self._due:
            told = self._outbox.read(refresh.last_told, self._sink, self._due[0]).result()
            if told is not None:
                return told
            self._due.popleft()
        self._failures = 0
        return None

    def told(self, now: float) -> None:
        """Note that the record of the last `next` was accepted, or refused for good."""
        self._told_at[self._due.popleft()] = now
        self._failures = 0
        self.next_at = now

    def failed(self, now: float) -> None:
        """Note that the record of the last `next` was not accepted for now."""
        self._due.rotate(-1)
        self._failures += 1
        gap = delivery_gap(
            self._failures, seconds_to_not_before=None, urgent=False, retry_after=None, random=self._clock.random
        )
        self.next_at = now + min(gap, self._every_seconds or gap)

    def _may_tell(self, now: float) -> bool:
        """Return whether what is stored is what is: it may be of before a restart, or of another machine.

        A service that is silent is not waited for without end.
        """
        if self._outbox.records.is_in_doubt:
            return False
        return self._has_seen_document() or now >= self._began_at + _FIRST_DOCUMENT_SECONDS

    def _read_due(self, now: float, every_seconds: float) -> None:
        """Find the events that are due at *now*, those that waited longest first, and when the next one is."""
        wall = self._clock.timestamp()
        delivered = self._outbox.read(refresh.told_events, self._sink).result()
        self._told_at = {key: moment for key, moment in self._told_at.items() if key in delivered}
        due_at = {key: self._last_told(key, wall - at, now) + every_seconds for key, at in delivered.items()}
        self._due.extend(sorted((key for key in due_at if due_at[key] <= now), key=due_at.__getitem__))
        self.next_at = min([now + every_seconds, *(moment for moment in due_at.values() if moment > now)])

    def _last_told(self, event_key: str, age_seconds: float, now: float) -> float:
        """Return when the event was told last, by a delivery of *age_seconds* ago or by a refresh since."""
        # A negative age: the wall clock was set back, and says nothing.
        delivered_at = now - age_seconds if age_seconds >= 0 else _AT_ONCE
        return max(self._told_at.get(event_key, _AT_ONCE), delivered_at)
