"""Computes `active_event_ids`, the list of open events in every record.

If a consumer misses the last record of an event, it can detect the end of the event in any later record, because the
list no longer contains the event.
"""

from __future__ import annotations

from bridge.clock import Instant
from bridge.events.event import Document
from bridge.events.transitions import is_over

MOST_LISTED_EVENTS = 200
_AGREEMENT_SECONDS = 300.0


def listed_event_ids(document: Document) -> tuple[str, ...] | None:
    """Return the sorted EventIds of the open events, or None if the list cannot be complete."""
    ids = [event.event_id for event in document.events]
    if None in ids or len(ids) > MOST_LISTED_EVENTS:
        return None
    return tuple(sorted({event.event_id for event in document.events if event.event_id and not is_over(event)}))


class Agreement:
    """Compares the first IMDS responses if the agent starts without a stored document.

    If responses differ, the list of open events is unknown until all responses have agreed for five minutes.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._shown: Document | None = None
        self._since: Instant | None = None
        self._has_disagreed = False

    def note(self, document: Document, instant: Instant) -> None:
        """Compare *document*, a good response, with the previous good response."""
        if not self._is_needed or document is self._shown:
            return
        if self._shown is not None and _keys(self._shown) != _keys(document):
            self._is_needed = self._has_disagreed = not self._is_reached(instant)
            self._since = instant
        self._shown = document
        self._since = self._since or instant

    def is_known(self, instant: Instant) -> bool:
        """Return whether the responses so far are enough to list the open events."""
        return not self._has_disagreed or self._is_reached(instant)

    def _is_reached(self, instant: Instant) -> bool:
        return self._since is not None and instant.monotonic - self._since.monotonic >= _AGREEMENT_SECONDS


def _keys(document: Document) -> set[str]:
    return {event.key for event in document.events}
