"""Computes the digest of an event: the SHA-256 hash of its canonical JSON (RFC 8785).

A signed decision contains the digest of the event that the approver saw. If Azure later changes the event's type, time,
or machines, the digest no longer matches, and the agent refuses the decision.

A portal can compute the digest in any language from the fields of a record. PROTOCOL.md describes the canonical form,
and tests/unit/vectors/digests.json contains examples.
"""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from functools import lru_cache
from operator import attrgetter, methodcaller
from typing import Any

from bridge.events.event import ScheduledEvent

_UTF_16 = methodcaller("encode", "utf-16-be")
_values_of = attrgetter("duration_seconds", "event_id", "event_source", "event_type", "not_before_raw", "resources")


def digest(event: ScheduledEvent) -> str:
    """Return the SHA-256 of *event* in canonical form, as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(canonical_json(event)).hexdigest()


def canonical_json(event: ScheduledEvent) -> bytes:
    """Return six members of *event* as canonical JSON (RFC 8785). `digest` hashes these bytes.

    ``NotBefore`` is the unparsed text from Azure (``not_before_raw``). Unknown values are null. ``Resources`` contains
    no duplicates and is sorted by UTF-16 code units, as JavaScript sorts strings.
    """
    return _canonical_json(_values_of(event))


@lru_cache(maxsize=1)  # a portal signs one decision for each VM of an event
def _canonical_json(values: tuple[Any, ...]) -> bytes:
    seconds, event_id, event_source, event_type, not_before, resources = values
    members = {  # in the order of RFC 8785
        # RFC 8785 section 3.2.2.3 converts a number to a double and writes its shortest form, as JavaScript does.
        "DurationInSeconds": None if seconds is None else int(Decimal(repr(float(seconds)))),
        "EventId": event_id,
        "EventSource": event_source,
        "EventType": event_type,
        "NotBefore": not_before,
        "Resources": None if resources is None else sorted(set(resources), key=_UTF_16),
    }
    # With ensure_ascii=False, json.dumps escapes the same characters as RFC 8785 section 3.2.2.2.
    return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
