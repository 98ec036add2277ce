"""Digest of an event: SHA-256 over its RFC 8785 canonical JSON. It ties a decision to the event that a person saw.

If Azure changes the type, the time, or the machines after a decision, the digest of the event differs from the signed
digest, and the decision does not count. Portals compute the digest in any language from the fields of a record. The
digest therefore uses Azure's names and RFC 8785, not the JSON of one library. PROTOCOL.md describes the form, and
tests/unit/vectors/digests.json has examples.
"""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal

from bridge.events.event import ScheduledEvent

# Beyond this an ES6 number, which is what RFC 8785 section 3.2.2.3 prints, is no longer every integer.
_LARGEST_EXACT = 2**53 - 1


def digest(event: ScheduledEvent) -> str:
    """Return the SHA-256 of *event* in canonical form, as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(canonical_json(event)).hexdigest()


def canonical_json(event: ScheduledEvent) -> bytes:
    """Return what `digest` hashes: six members of *event*, as RFC 8785 writes them.

    NotBefore is the text that came (``not_before_raw``). What is unknown is null. Resources are a set: duplicates
    removed, sorted by UTF-16 code units (the order of RFC 8785 section 3.2.3, and of JavaScript's sort).
    """
    # In RFC 8785's order of keys.
    members = {
        "DurationInSeconds": _number(event.duration_seconds),
        "EventId": _text(event.event_id),
        "EventSource": _text(event.event_source),
        "EventType": _text(event.event_type),
        "NotBefore": _text(event.not_before_raw),
        "Resources": _list(event.resources),
    }
    return ("{" + ",".join(f'"{name}":{value}' for name, value in members.items()) + "}").encode()


def utf16_code_units(text: str) -> bytes:
    """Return the key that sorts texts by UTF-16 code units."""
    return text.encode("utf-16-be")


def _text(value: str | None) -> str:
    # json.dumps escapes exactly what RFC 8785 section 3.2.2.2 does, once it is told to leave the rest of Unicode be.
    return "null" if value is None else json.dumps(value, ensure_ascii=False)


def _list(names: tuple[str, ...] | None) -> str:
    if names is None:
        return "null"
    return "[" + ",".join(_text(name) for name in sorted(set(names), key=utf16_code_units)) + "]"


def _number(value: int | None) -> str:
    if value is None:
        return "null"
    if abs(value) <= _LARGEST_EXACT:
        return str(value)
    # Below 1e16 Python writes the ".0" of a whole number, which ES6 never does.
    return format(Decimal(repr(float(value))), "f").removesuffix(".0")
