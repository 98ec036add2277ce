"""The audit: who did what, when and why, as a chain of entries, each with the hash of the one before.

Whoever changes an entry, takes one away or puts one in must make every later hash anew; and the last hash stands in
every export and every backup. `first_fault` names the first entry that is not as it was written. What it cannot see is
a chain whose end was cut off together with the counter of entries: compare with the last hash that somebody else kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from bridge.events.event import compact_json

#: What stands before the first entry.
NO_HASH = "0" * 64


class NewEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was done."""

    actor: str
    """A user, the approvers of a decision, or ``portal``."""
    action: str
    """One of a few words, such as ``approved``."""
    subject: str
    """What it was done to: the key of an event, or nothing."""
    details: dict[str, Any]
    """Plain JSON values."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the chain."""

    entry: int
    """Counts from 1, without a gap."""
    at: str
    """When it was written: UTC, milliseconds."""
    actor: str
    action: str
    subject: str
    details: dict[str, Any]
    previous_hash: str
    """That of the entry before; 64 zeros for the first."""
    hash: str
    """SHA-256 of the JSON list of all fields before, keys sorted, no spaces, ASCII."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The first entry that is not as it was written."""

    entry: int
    why: str


def chained(new: NewEntry, *, entry: int, at: str, previous_hash: str) -> Entry:
    """Return *new* as the entry with that number, after the one with *previous_hash*."""
    return Entry(
        entry=entry,
        at=at,
        actor=new.actor,
        action=new.action,
        subject=new.subject,
        details=new.details,
        previous_hash=previous_hash,
        hash=_hash(entry, at, new.actor, new.action, new.subject, new.details, previous_hash),
    )


def first_fault(entries: Iterable[Entry], *, count: int) -> Fault | None:
    """Return what is wrong with *entries*, all of them in order, of which *count* were written; None: nothing is."""
    last, last_hash = 0, NO_HASH
    for found in entries:
        if found.entry != last + 1:
            return Fault(entry=last + 1, why="it is not there")
        if found.previous_hash != last_hash:
            return Fault(entry=found.entry, why="the entry before it was another when this one was written")
        made_again = (found.at, found.actor, found.action, found.subject, found.details)
        if found.hash != _hash(found.entry, *made_again, found.previous_hash):
            return Fault(entry=found.entry, why="it was changed after it was written")
        last, last_hash = found.entry, found.hash
    return None if last >= count else Fault(entry=last + 1, why="it is not there")


def _hash(*fields: object) -> str:
    return hashlib.sha256(compact_json(list(fields)).encode()).hexdigest()
