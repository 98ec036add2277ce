"""The document by EventId: compares the version of an event in a decision with the event that Azure shows."""

from __future__ import annotations

import msgspec

from bridge.approval.digest import digest
from bridge.approval.refusal_reasons import RefusalReason
from bridge.events.event import Document, ScheduledEvent


class DocumentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """One response of the metadata service by EventId. An EventId that occurs twice cannot be approved."""

    events: dict[str, ScheduledEvent]
    digests: dict[str, str]
    ambiguous: frozenset[str] = frozenset()
    unsettled: frozenset[str] = frozenset()
    """The EventIds with an unconfirmed change: decisions on them stay open, and nothing is posted for them."""
    tracked: DocumentIndex | None = None
    """The tracked document, if it is another document."""

    def why_not(self, event_id: str, event_digest: str) -> RefusalReason | None:
        """Return why this version of the event cannot be approved; None if it can."""
        event = self.events.get(event_id)
        if event is None or event_id in self.ambiguous:
            return RefusalReason.EVENT_UNKNOWN
        if event.event_status != "Scheduled":
            return RefusalReason.EVENT_NOT_SCHEDULED
        return None if self.digests[event_id] == event_digest else RefusalReason.EVENT_CHANGED

    def is_confirmed(self, event_id: str, event_digest: str) -> bool:
        """Return whether the response and the tracked document both show this version of the event as Scheduled."""
        if event_id in self.unsettled or self.why_not(event_id, event_digest) is not None:
            return False
        return self.tracked is None or self.tracked.why_not(event_id, event_digest) is None


def index_document(
    document: Document, *, unsettled: frozenset[str] = frozenset(), tracked: Document | None = None
) -> DocumentIndex:
    """Return the index of *document*, a response, and of the *tracked* document."""
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
