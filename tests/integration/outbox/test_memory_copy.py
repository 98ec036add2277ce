"""What an outbox in memory begins with, where the disk can be read in part only."""

import sqlite3
from contextlib import closing

from bridge.events.event import Document
from bridge.outbox.memory_copy import copy_outline


def test_every_event_waits_for_the_disk_where_it_cannot_be_read_what_waits_there(kit):
    outbox = kit.open()
    events = [kit.event("E-1"), kit.event("E-2", event_type="Preempt")]
    kit.commit(outbox, *events, document=Document(incarnation=1, events=tuple(events)))
    outbox.close()
    with closing(sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)) as source:
        source.execute("DROP TABLE deliveries")
        with closing(copy_outline([source], {})) as memory:
            held = {key for (key,) in memory.execute("SELECT event_key FROM held")}
    assert held == {event.key for event in events}
