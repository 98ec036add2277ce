"""Refusals of decisions and rules, and the limit of their records.

A stranger can send ten thousand forgeries. These forgeries must not evict real records or page people ten thousand
times, so refusals produce at most one record per minute and reason, with a count.
"""

from __future__ import annotations

import math
import threading

import msgspec

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import RefusalReason
from bridge.events.event import ScheduledEvent
from bridge.events.record import Approval, Transition
from bridge.outbox.rows import ApprovalRecord

QUIET_SECONDS = 60.0

EXPLAINED = {
    RefusalReason.UNKNOWN_KEY: "The key that signed the decision is no longer trusted.",
    RefusalReason.EXPIRED: "The decision expired before it could be checked. Decide again.",
    RefusalReason.EVENT_UNKNOWN: "The document of this VM does not contain the event. The event may have ended.",
    RefusalReason.EVENT_CHANGED: "The event changed after the decision. Decide again on its newest record.",
    RefusalReason.EVENT_NOT_SCHEDULED: "The event is no longer Scheduled, so it cannot be approved.",
    RefusalReason.SUPERSEDED: "A newer decision on this event wins.",
    RefusalReason.TOO_FEW_APPROVERS: "Too few approvers decided before this decision expired.",
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A decision or a rule that the agent does not follow."""

    reason: RefusalReason
    message: str
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    event_id: str | None = None
    event: ScheduledEvent | None = None
    arrivals: tuple[int, ...] = ()
    """The stored decisions behind it."""


class _Refusals(msgspec.Struct, kw_only=True):
    """The refusals of one reason that are not recorded yet."""

    first: Refusal | None = None
    count: int = 0
    quiet_until: float = -math.inf


class RefusalLimiter:
    """Counts refusals by reason and returns their records. Safe to use from several threads.

    The first refusal of a reason produces a record at once. The refusals of the following minute produce one record.
    """

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_reason: dict[RefusalReason, _Refusals] = {}

    def add(self, refusal: Refusal) -> None:
        """Count one refusal."""
        with self._lock:
            refusals = self._by_reason.setdefault(refusal.reason, _Refusals())
            refusals.first = refusals.first or refusal
            refusals.count += 1

    def take(self) -> list[ApprovalRecord]:
        """Return the records that are due."""
        now = self._clock.monotonic()
        records = []
        with self._lock:
            for refusals in self._by_reason.values():
                if refusals.first is not None and refusals.quiet_until <= now:
                    records.append(_record(refusals.first, refusals.count))
                    refusals.first, refusals.count, refusals.quiet_until = None, 0, now + QUIET_SECONDS
        return records

    def wait_seconds(self) -> float:
        """Return the seconds until a record is due; infinity without refusals."""
        with self._lock:
            waiting = [each.quiet_until for each in self._by_reason.values() if each.count]
        return max(min(waiting, default=math.inf) - self._clock.monotonic(), 0.0)


def _record(refusal: Refusal, count: int) -> ApprovalRecord:
    message = refusal.message
    if count > 1:
        message = f"{message} ({count} decisions were refused for this reason; this is the first of them.)"
    return ApprovalRecord(
        transition=Transition.APPROVAL_REFUSED,
        event=refusal.event,
        approval=Approval(
            source=refusal.source,
            decision_id=refusal.decision_id,
            approvers=refusal.approvers,
            reason=message,
            result=refusal.reason.value,
        ),
        arrivals=refusal.arrivals,
    )
