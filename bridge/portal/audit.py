"""Links audit entries into a hash chain, and finds the first entry that breaks the chain.

If someone changes, removes, or inserts an entry, the hash chain breaks, and `first_fault` returns the first invalid
entry. However, someone could remove the newest entries and decrease the entry counter without breaking the chain. To
detect this, compare the last hash with a copy that is stored elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from bridge.events.event import compact_json

NO_HASH = "0" * 64


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit hash chain. `chained` sets the fields that have a default."""

    entry: int = 0
    """Counts from 1 without gaps."""
    at: str = ""
    actor: str
    """A user, the approvers of a decision, or ``portal``."""
    action: str
    """A fixed word, such as ``approved``."""
    subject: str
    """The key of an event, the name of a user, or ""."""
    details: dict[str, Any]
    previous_hash: str = ""
    """64 zeros for the first entry."""
    hash: str = ""
    """SHA-256 of the JSON list of the other fields, with sorted keys, no spaces, and ASCII only."""

    @property
    def event_keys(self) -> tuple[str, ...]:
        """Return the keys of the events that the entry is about."""
        keys = [each.get("event_key") for each in self._events] or [self.subject]
        return tuple(dict.fromkeys(key for key in keys if isinstance(key, str) and key))

    @property
    def vms(self) -> int:
        """Return the number of VMs in the events, or in decisions signed outside the portal."""
        found = [(each.get("resource_group"), each.get("resources")) for each in self._events]
        found = found or [("", self.details.get("decisions"))]
        vms = [(group, vm) for group, each in found if isinstance(each, list | dict) for vm in each]
        return len({compact_json(each).casefold() for each in vms})

    @property
    def _events(self) -> list[dict[str, Any]]:
        events = self.details.get("events")
        return [each for each in events if isinstance(each, dict)] if isinstance(events, list) else []


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The first invalid entry."""

    entry: int
    why: str


def chained(new: Entry, *, entry: int, at: str, previous_hash: str) -> Entry:
    """Return *new* as the entry with the number *entry*, after the entry with *previous_hash*."""
    new = msgspec.structs.replace(new, entry=entry, at=at, previous_hash=previous_hash)
    return msgspec.structs.replace(new, hash=_hash(new))


def first_fault(entries: Iterable[Entry], *, count: int) -> Fault | None:
    """Return the first fault of the sorted *entries*.

    *count* is the expected number of entries.
    """
    last, last_hash = 0, NO_HASH
    for found in entries:
        if found.entry != last + 1:
            return Fault(entry=last + 1, why="it is missing")
        if found.previous_hash != last_hash:
            return Fault(entry=found.entry, why="it does not contain the hash of the previous entry")
        if found.hash != _hash(found):
            return Fault(entry=found.entry, why="it was changed")
        last, last_hash = found.entry, found.hash
    return None if last >= count else Fault(entry=last + 1, why="it is missing")


def _hash(entry: Entry) -> str:
    fields = msgspec.structs.astuple(entry)[:-1]
    return hashlib.sha256(compact_json(list(fields)).encode()).hexdigest()
