"""Computes `active_event_ids`, the list of open events in every record.

A consumer that misses an event's last record can still tell from any later record that the event is over, because the
list in the later record does not contain the event.
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
    """Compares the first IMDS responses with each other if no document is stored at startup.

    If responses differ, the list of open events is unknown until all responses have agreed for five minutes.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._keys: frozenset[str] | None = None
        self._since = 0.0
        """The monotonic time of the first response with these keys."""
        self._has_disagreed = False

    def note(self, document: Document, instant: Instant) -> None:
        """Compare *document*, a good response, with the previous good response."""
        if not self._is_needed:
            return
        keys = frozenset(event.key for event in document.events)
        if self._keys not in {None, keys}:
            self._is_needed = self._has_disagreed = not self._is_reached(instant)
        if self._keys != keys:
            self._keys, self._since = keys, instant.monotonic

    def is_known(self, instant: Instant) -> bool:
        """Return whether the responses so far are enough to list the open events."""
        return not self._has_disagreed or self._is_reached(instant)

    def _is_reached(self, instant: Instant) -> bool:
        return instant.monotonic - self._since >= _AGREEMENT_SECONDS
