"""Which events a sink that disturbs people or workloads may have begun: those it must also be told the end of.

Such a sink (`Sink.skips_what_is_over`) is not sent an event of which nothing has reached it when the end is already
known: nobody is paged, and nothing drained, for what is over. Skipping is only safe while surely nothing arrived, so
before each send the event is marked here, in its own commit, and the mark is taken away only when the peer surely did
not take the record. A crash or a timeout leaves the mark: the end is sent then, which at worst ends what never began.

Only what is over is skipped: an event that came back after its end is news again. An end alone is sent: whoever wants
nothing but ends gets them. From memory nothing is skipped, there the marks are not known.
"""

from __future__ import annotations

import msgspec

from bridge.events.event import decode_document
from bridge.events.record import decode_record
from bridge.outbox.storage import SQL, Storage


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """What `begin` found."""

    skipped: int = 0
    """How many rows were given up, because the event is over and never began; nothing is to be sent then."""
    is_new: bool = False
    """True when nothing of the event had been tried before: a sure failure of this try takes the mark away."""


def begin(store: Storage, sink: str, event_key: str, now: float) -> Beginning:
    """Mark that *sink* is about to be sent something of the event, or give the event up because it is over."""
    end = None if store.in_memory else _end_of_what_never_began(store, sink, event_key)
    if end is not None:
        skipped = store.connection.execute(SQL["expire_event"], (now, event_key, sink, end)).rowcount
        return Beginning(skipped=skipped)
    marked = store.connection.execute(SQL["add_begun"], (sink, event_key)).rowcount
    return Beginning(is_new=marked == 1)


def forget(store: Storage, sink: str, event_key: str) -> None:
    """Take the mark away: the event did not begin, or *sink* knows its end."""
    store.connection.execute(SQL["drop_begun"], (sink, event_key))


def clean_begun(store: Storage) -> None:
    """Take away the marks of events that are neither active nor owed."""
    text = dict(store.connection.execute(SQL["get_meta"])).get("document")
    active = {event.key for event in decode_document(text).events} if text is not None else set()
    for sink, event_key in store.connection.execute(SQL["idle_begun"]).fetchall():
        if event_key not in active:
            forget(store, sink, event_key)


def _end_of_what_never_began(store: Storage, sink: str, event_key: str) -> int | None:
    """Return the sequence up to which the event is over, its end included; null when it began or is not over.

    An event may come back after an end that was inferred: what follows its last end is news.
    """
    if store.connection.execute(SQL["is_begun"], (sink, event_key, sink, event_key)).fetchone():
        return None
    last_end, began = None, False
    for sequence, body in store.connection.execute(SQL["owed_bodies"], (event_key, sink)):
        if not decode_record(body).transition.is_ending:
            began = True
        elif began:
            last_end = sequence
    return last_end
