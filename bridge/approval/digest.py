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

from bridge.events.event import ScheduledEvent

# RFC 8785 section 3.2.2.3 serializes numbers as JavaScript does, and larger integers are not exact in JavaScript.
_LARGEST_EXACT = 2**53 - 1


def digest(event: ScheduledEvent) -> str:
    """Return the SHA-256 of *event* in canonical form, as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(canonical_json(event)).hexdigest()


def canonical_json(event: ScheduledEvent) -> bytes:
    """Return six members of *event* as canonical JSON (RFC 8785). `digest` hashes these bytes.

    ``NotBefore`` is the unparsed text from Azure (``not_before_raw``). Unknown values are null. ``Resources`` contains
    no duplicates and is sorted by UTF-16 code units, as JavaScript sorts strings.
    """
    # The keys are in the order of RFC 8785.
    members = {
        "DurationInSeconds": _number(event.duration_seconds),
        "EventId": _text(event.event_id),
        "EventSource": _text(event.event_source),
        "EventType": _text(event.event_type),
        "NotBefore": _text(event.not_before_raw),
        "Resources": _list(event.resources),
    }
    return ("{" + ",".join(f'"{name}":{value}' for name, value in members.items()) + "}").encode()


def _text(value: str | None) -> str:
    # With ensure_ascii=False, json.dumps escapes the same characters as RFC 8785 section 3.2.2.2.
    return "null" if value is None else json.dumps(value, ensure_ascii=False)


def _list(names: tuple[str, ...] | None) -> str:
    if names is None:
        return "null"
    by_utf16_code_units = sorted(set(names), key=lambda name: name.encode("utf-16-be"))
    return "[" + ",".join(map(_text, by_utf16_code_units)) + "]"


def _number(value: int | None) -> str:
    if value is None:
        return "null"
    if abs(value) <= _LARGEST_EXACT:
        return str(value)
    # Python adds ".0" to whole numbers below 1e16, and JavaScript does not.
    return format(Decimal(repr(float(value))), "f").removesuffix(".0")
