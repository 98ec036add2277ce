"""Indexes a document by EventId, and checks whether an event still matches a decision."""

from __future__ import annotations

import msgspec

from bridge.approval.digest import digest
from bridge.approval.refusal_reasons import RefusalReason
from bridge.events.event import Document, ScheduledEvent


class DocumentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Maps each EventId to its event. An event with a duplicate EventId is never approved."""

    events: dict[str, ScheduledEvent]
    digests: dict[str, str]
    ambiguous: frozenset[str] = frozenset()
    unsettled: frozenset[str] = frozenset()
    """The EventIds with an unconfirmed change. Decisions on these events stay open, and nothing is posted for them."""
    tracked: DocumentIndex | None = None
    """The document that the agent tracks, if it differs from this document."""

    def why_not(self, event_id: str, event_digest: str) -> RefusalReason | None:
        """Return why this version of the event cannot be approved, or None if it can be."""
        event = self.events.get(event_id)
        if event is None or event_id in self.ambiguous:
            return RefusalReason.EVENT_UNKNOWN
        if event.is_advisory:
            return RefusalReason.EVENT_ADVISORY
        if event.event_status != "Scheduled":
            return RefusalReason.EVENT_NOT_SCHEDULED
        return None if self.digests[event_id] == event_digest else RefusalReason.EVENT_CHANGED

    def is_confirmed(self, event_id: str, event_digest: str) -> bool:
        """Return whether both documents show this version of the event as Scheduled."""
        if event_id in self.unsettled or self.why_not(event_id, event_digest) is not None:
            return False
        return self.tracked is None or self.tracked.why_not(event_id, event_digest) is None


def index_document(
    document: Document, *, unsettled: frozenset[str] = frozenset(), tracked: Document | None = None
) -> DocumentIndex:
    """Return the index of *document*, a response from IMDS, and of the *tracked* document."""
    events: dict[str, ScheduledEvent] = {}
    ambiguous = set()
    for event in document.events:
        if event.event_id is not None:
            if event.event_id in events:
                ambiguous.add(event.event_id)
            events[event.event_id] = event
    return DocumentIndex(
        events=events,
        digests={event_id: digest(event) for event_id, event in events.items()},
        ambiguous=frozenset(ambiguous),
        unsettled=unsettled,
        tracked=None if tracked is None or tracked is document else index_document(tracked),
    )
