"""At most one record a minute and reason about refusals, with a count.

A stranger can send ten thousand forgeries, and must not be able to push real records out of the outbox or to page
anybody ten thousand times. The first of a kind is told at once; what follows within the minute is counted, and told
together when it is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from bridge.approval.evaluate import Refusal
from bridge.events.record import Approval, Transition
from bridge.outbox.approvals import Outcome

QUIET_SECONDS = 60.0


class _Kind(msgspec.Struct, kw_only=True):
    first: Refusal | None = None
    count: int = 0
    quiet_until: float = float("-inf")


class RefusalLimiter:
    """Counts refusals by reason; safe to use from many threads. *monotonic* returns seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}

    def add(self, refusal: Refusal) -> None:
        """Note one refusal."""
        with self._lock:
            kind = self._kinds.setdefault(refusal.reason, _Kind())
            kind.first = kind.first or refusal
            kind.count += 1

    def take(self) -> list[Outcome]:
        """Return the records that may be written now."""
        now = self._monotonic()
        with self._lock:
            ready = [kind for kind in self._kinds.values() if kind.count and kind.quiet_until <= now]
            outcomes = [_outcome(kind) for kind in ready]
            for kind in ready:
                kind.first, kind.count, kind.quiet_until = None, 0, now + QUIET_SECONDS
        return outcomes

    def wait_seconds(self) -> float | None:
        """Return the seconds until `take` has something, null when nothing waits."""
        with self._lock:
            waiting = [kind.quiet_until for kind in self._kinds.values() if kind.count]
        return max(min(waiting) - self._monotonic(), 0.0) if waiting else None


def _outcome(kind: _Kind) -> Outcome:
    refusal = kind.first
    assert refusal is not None  # noqa: S101 - counted, so there was one
    said = refusal.said
    if kind.count > 1:
        said = f"{said} ({kind.count} decisions were refused for this reason; this is the first of them.)"
    return Outcome(
        transition=Transition.APPROVAL_REFUSED,
        event=refusal.event,
        approval=Approval(
            source=refusal.source,
            decision_id=refusal.decision_id,
            approvers=refusal.approvers,
            reason=said,
            result=refusal.reason,
        ),
    )
