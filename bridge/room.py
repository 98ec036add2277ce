"""Keeping the outbox within its bounds: by age what is done, by size whatever must go.

When it is full, what goes first is what nobody is owed; then what a person has not looked at; then the oldest that is
still owed, counted as evicted. A sink that was down for a month must not fill a disk, and must not lose today for it.
"""

from __future__ import annotations

import logging

from bridge.record import decode_document
from bridge.store import SQL, Store
from bridge.transitions import is_over

logger = logging.getLogger(__name__)

_CHUNK = 64
#: Room is made beyond the limit, so that a full outbox does not evict with every single record.
_TARGET = 0.95
_WORTH_GIVING_BACK = 1024


def make_room(store: Store, *, now: float) -> int:
    """Delete and evict until *store* is within its bounds; return how many deliveries were evicted."""
    limit = store.max_bytes * _TARGET
    evicted = 0
    for choose, clear in (("oldest_finished", None), ("oldest_parked", "evict_parked"), ("oldest_owed", "evict_owed")):
        while store.used_bytes > limit:
            chosen = store.connection.execute(SQL[choose], (store.floor, _CHUNK)).fetchall()
            if not chosen:
                break
            for (sequence,) in chosen:
                if clear is not None:
                    evicted += store.connection.execute(SQL[clear], (now, sequence)).rowcount
                _delete_if_finished(store, sequence)
        if choose == "oldest_finished" and store.in_memory and store.used_bytes > limit:
            store.connection.execute(SQL["forget_bodies"], (store.floor,))
    if evicted:
        logger.error(
            "The outbox is full: the oldest records were evicted undelivered. Raise state.max_bytes or mend the sink.",
            extra={"evicted": evicted, "max_bytes": store.max_bytes},
        )
    return evicted


def clean(store: Store, *, before: float, limit: int) -> int:
    """Delete up to *limit* records observed before *before* that nobody is owed; return how many.

    The last record of an active event stays: a sink that is configured tomorrow gets it.
    """
    keep = _last_of_active(store)
    chosen = store.connection.execute(SQL["finished_before"], (before, limit)).fetchall()
    gone = [sequence for (sequence,) in chosen if sequence not in keep]
    for sequence in gone:
        _delete(store, sequence)
    if gone and int(store.connection.execute("PRAGMA freelist_count").fetchone()[0]) > _WORTH_GIVING_BACK:
        store.connection.execute(f"PRAGMA incremental_vacuum({_WORTH_GIVING_BACK})").fetchall()
    return len(gone)


def _last_of_active(store: Store) -> set[int]:
    text = dict(store.connection.execute(SQL["get_meta"])).get("document")
    events = () if text is None else decode_document(text).events
    keys = {event.key for event in events if not is_over(event)}
    return {store.connection.execute(SQL["last_sequence_of_event"], (key,)).fetchone()[0] for key in keys}


def _delete_if_finished(store: Store, sequence: int) -> None:
    if not store.connection.execute(SQL["is_owed"], (sequence,)).fetchone():
        _delete(store, sequence)


def _delete(store: Store, sequence: int) -> None:
    store.connection.execute(SQL["delete_deliveries"], (sequence,))
    store.connection.execute(SQL["delete_record"], (sequence,))
