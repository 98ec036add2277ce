"""Events and documents to compare, by hand and by Hypothesis; and whether two have the same content."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
from hypothesis import strategies as st

from bridge.events.event import Document, ScheduledEvent, compact_json

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
SOON = NOW + timedelta(minutes=10)
PAST = NOW - timedelta(minutes=10)
VM = "vm_0"


def event(status: str = "Scheduled", **fields: Any) -> ScheduledEvent:
    """Return a Reboot of this VM in ten minutes, but for *fields*."""
    fields = {"event_id": "A-1", "event_type": "Reboot", "resources": (VM,), "not_before": SOON, **fields}
    return ScheduledEvent(event_status=status, **fields)


def document(*events: ScheduledEvent, incarnation: int | str | None = 1) -> Document:
    """Return a document of *events*."""
    return Document(incarnation=incarnation, events=events)


_statuses = st.sampled_from(["Scheduled", "Started", "Completed", "Canceled", "Paused"])
_events: st.SearchStrategy[ScheduledEvent] = st.builds(
    ScheduledEvent,
    event_id=st.sampled_from(["A", "B", "C", None]),
    event_status=_statuses,
    event_type=st.sampled_from(["Freeze", "Reboot", None]),
    resources=st.sampled_from([(VM,), ("x", VM), (VM, "x"), (), None]),
    not_before=st.sampled_from([SOON, PAST, None]),
    duration_seconds=st.sampled_from([None, 0, 5]),
    extra=st.sampled_from([{}, {"X": 1}]),
)
#: Documents of up to four events, no two of which share a key.
DOCUMENTS: st.SearchStrategy[Document] = st.builds(
    Document,
    incarnation=st.one_of(st.none(), st.integers(0, 5), st.sampled_from(["1", "2", "abc"])),
    events=st.lists(_events, max_size=4, unique_by=lambda e: e.key).map(tuple),
)


def same_content(one: Document, other: Document) -> bool:
    """Return whether both documents hold the same events, whatever their incarnation and order."""
    return Counter(map(_content, one.events)) == Counter(map(_content, other.events))


def _content(event: ScheduledEvent) -> str:
    """Return *event* as text, Resources as a set, the text of NotBefore only where it could not be read."""
    plain = msgspec.to_builtins(event)
    if event.resources is not None:
        plain["resources"] = sorted(set(event.resources))
    plain["not_before_raw"] = (event.not_before_raw or "").strip() if event.not_before is None else ""
    return compact_json(plain)
