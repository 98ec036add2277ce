"""A hold prevents an event from being approved.

- A hold applies to the EventId, even if Azure changes the event. One signature is enough.
- If an event has a hold and an approve decision, the decision with the newer issue time (``iat``) wins. On a tie, the
  hold wins.
- A hold withdraws an approval that has not been posted, and it stops every rule for its event.
- A hold stays in force until the event is gone. A later approve decision overrides the hold, but rules remain stopped
  for the event.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge.events.record import Verdict
from bridge.outbox.rows import OPEN_DECISIONS, StoredDecision


def newest_holds(decisions: Iterable[StoredDecision]) -> dict[str, StoredDecision]:
    """Return the newest open hold of each EventId, even if `evaluate` has not processed it."""
    newest: dict[str, StoredDecision] = {}
    for each in decisions:
        if each.verdict is Verdict.HOLD and each.state in OPEN_DECISIONS:
            known = newest.get(each.event_id)
            if known is None or each.issued_at > known.issued_at:
                newest[each.event_id] = each
    return newest


def wins_over(hold: StoredDecision | None, issued_at: int | None) -> bool:
    """Return whether *hold* overrides an approve decision, or a rule if *issued_at* is None."""
    return hold is not None and (issued_at is None or issued_at <= hold.issued_at)
