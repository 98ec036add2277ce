"""Keeping the outbox within its bounds: by age what is done, by size whatever must go.

When it is full, what goes first is what nobody is owed; then what a person has not looked at; then the oldest that is
still owed, counted as evicted. A sink that was down for a month must not fill a disk, and must not lose today for it.
"""

from __future__ import annotations

import logging

from bridge.events.diff import is_over
from bridge.events.event import decode_document
from bridge.outbox.begun import clean_begun
from bridge.outbox.storage import SQL, Storage

logger = logging.getLogger(__name__)

_CHUNK = 64
#: Room is made when this part of the bound is used, down to the other: not with every single record.
_FULL, _TARGET = 0.95, 0.94
_WORTH_GIVING_BACK = 1024


def enforce_size(store: Storage, *, now: float, newest: int) -> int:
    """Delete and evict until *store* is within its bounds; return how many deliveries were evicted.

    Records from the sequence *newest* on were only just seen: they stay, so that each is tried at least once. The
    document counts for nothing here: it cannot be evicted, and would evict all records in its stead.
    """
    if _used_bytes(store) <= store.max_bytes * _FULL:
        return 0
    _delete_oldest(store, "oldest_finished", newest)
    if store.in_memory and _is_full(store):
        store.connection.execute(SQL["forget_bodies"], (store.floor,))
    evicted = _delete_oldest(store, "oldest_parked", newest, ("evict_parked", now))
    evicted += _delete_oldest(store, "oldest_owed", newest, ("evict_owed", now))
    if evicted:
        logger.error(
            "The outbox is full: the oldest records were evicted undelivered. Mend the sink, or raise state.max_bytes.",
            extra={"evicted": evicted, "max_bytes": store.max_bytes, "in_memory": store.in_memory},
        )
    return evicted


def _delete_oldest(store: Storage, choose: str, newest: int, evict: tuple[str, float] | None = None) -> int:
    """Delete what *choose* finds before *newest*, oldest first, until there is room; return how many were evicted."""
    evicted, last = 0, store.floor
    while _is_full(store):
        found = store.connection.execute(SQL[choose], (last, _CHUNK)).fetchall()
        chosen = [sequence for (sequence,) in found if sequence < newest]
        if not chosen:
            break
        for sequence in chosen:
            if evict is not None:
                statement, now = evict
                evicted += store.connection.execute(SQL[statement], (now, sequence)).rowcount
            if not store.connection.execute(SQL["is_owed"], (sequence,)).fetchone():
                _delete(store, sequence)
        last = chosen[-1]
    return evicted


def _is_full(store: Storage) -> bool:
    return _used_bytes(store) > store.max_bytes * _TARGET


def _used_bytes(store: Storage) -> int:
    (document_bytes,) = store.connection.execute(SQL["document_bytes"]).fetchone()
    return store.used_bytes - int(document_bytes or 0)


def clean(store: Storage, *, before: float, limit: int) -> int:
    """Delete up to *limit* records observed before *before* that nobody is owed; return how many.

    The last record of an active event stays: a sink that is configured tomorrow gets it. In memory nothing goes: there
    the disk's own rows are only known in part.
    """
    if store.in_memory:
        return 0
    clean_begun(store)
    keep = _last_of_active(store)
    chosen = store.connection.execute(SQL["finished_before"], (before, limit)).fetchall()
    gone = [sequence for (sequence,) in chosen if sequence not in keep]
    for sequence in gone:
        _delete(store, sequence)
    if gone and int(store.connection.execute("PRAGMA freelist_count").fetchone()[0]) > _WORTH_GIVING_BACK:
        store.connection.execute(f"PRAGMA incremental_vacuum({_WORTH_GIVING_BACK})").fetchall()
    return len(gone)


def _last_of_active(store: Storage) -> set[int]:
    text = dict(store.connection.execute(SQL["get_meta"])).get("document")
    events = () if text is None else decode_document(text).events
    keys = {event.key for event in events if not is_over(event)}
    return {store.connection.execute(SQL["last_sequence_of_event"], (key,)).fetchone()[0] for key in keys}


def _delete(store: Storage, sequence: int) -> None:
    store.connection.execute(SQL["delete_deliveries"], (sequence,))
    store.connection.execute(SQL["delete_record"], (sequence,))
