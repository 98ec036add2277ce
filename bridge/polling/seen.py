"""The documents that the poll saw while the outbox was being loaded, to be compared with what it knows once it is.

Each differs from the one before, and has the time of the first and of the last answer that showed it: a gap between
answers reads the same when they are compared later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from bridge.clock import Instant
from bridge.events.event import Document

#: With more events in all of them the oldest are dropped: an agent must not be killed for its memory.
_MOST_EVENTS = 2_000
_MOST_DOCUMENTS = 500


class _Seen(msgspec.Struct, kw_only=True):
    document: Document
    first: Instant
    last: Instant


class SeenDocuments:
    """Documents in the order in which they were seen; for one thread at a time."""

    def __init__(self) -> None:
        self._seen: deque[_Seen] = deque()
        self._events = 0

    def add(self, document: Document, moment: Instant) -> None:
        """Note that *document*, a good answer, was seen at *moment*."""
        if self._seen and self._seen[-1].document == document:
            self._seen[-1].last = moment
            return
        self._seen.append(_Seen(document=document, first=moment, last=moment))
        self._events += len(document.events)
        while len(self._seen) > 1 and (self._events > _MOST_EVENTS or len(self._seen) > _MOST_DOCUMENTS):
            self._events -= len(self._seen.popleft().document.events)

    def __iter__(self) -> Iterator[tuple[Document, Instant]]:
        """Return each document at the first moment when it was seen, and at the last."""
        for seen in list(self._seen):
            yield seen.document, seen.first
            if seen.last is not seen.first:
                yield seen.document, seen.last
