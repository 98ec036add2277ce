"""The documents that the poll saw while the outbox was being loaded, to be compared with what it knows once it is.

Each differs from the one before, and has the time of the first and of the last answer that showed it: a gap between
answers reads the same when they are compared later. What did not change from one to the next is kept once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from bridge.clock import Instant
from bridge.events.event import Document, ScheduledEvent

logger = logging.getLogger(__name__)

#: With more in all of them the oldest but the first are dropped: an agent must not be killed for its memory.
_MOST_EVENTS = 5_000
#: A document has a place for each of its events, also for those that it shares with the one before.
_PLACES_OF_ONE_EVENT = 100


class _Seen(msgspec.Struct, kw_only=True):
    document: Document
    first: Instant
    last: Instant
    size: int
    """In events, roughly."""


class SeenDocuments:
    """Documents in the order in which they were seen; for one thread at a time."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._size = 0
        self._has_dropped = False

    def add(self, document: Document, moment: Instant) -> None:
        """Note that *document*, a good answer, was seen at *moment*."""
        before = self._seen[-1] if self._seen else None
        if before is not None and before.document == document:
            before.last = moment
            return
        known = {} if before is None else {event.key: event for event in before.document.events}
        events = tuple(_shared(known.get(event.key), event) for event in document.events)
        new = sum(event is not known.get(event.key) for event in events)
        size = 1 + new + len(events) // _PLACES_OF_ONE_EVENT
        document = msgspec.structs.replace(document, events=events)
        self._seen.append(_Seen(document=document, first=moment, last=moment, size=size))
        self._size += size
        while self._size > _MOST_EVENTS and len(self._seen) > 2:  # noqa: PLR2004 - the first one, and this one
            self._drop()

    def _drop(self) -> None:
        """Drop the oldest but the first, which says what the agent before may have told."""
        if not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                "So much has changed while the outbox is being loaded that not all of it can be kept in memory. What "
                "sinks took is not told again; what they did not take of the changes in between is lost."
            )
        self._size -= self._seen.pop(1).size

    def __len__(self) -> int:
        """Return how many documents there are."""
        return len(self._seen)

    def __iter__(self) -> Iterator[tuple[Document, Instant]]:
        """Return each document at the first moment when it was seen, and at the last."""
        for seen in list(self._seen):
            yield seen.document, seen.first
            if seen.last is not seen.first:
                yield seen.document, seen.last


def _shared(known: ScheduledEvent | None, event: ScheduledEvent) -> ScheduledEvent:
    return known if known == event and known is not None else event
