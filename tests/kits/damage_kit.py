"""An outbox that something damages: how its file is written over, what an agent does meanwhile, what must hold then."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing

from outbox_kit import OutboxKit

from bridge.events.event import Document, VmIdentity
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.outbox.storage import Storage

COUNT = 300
DELIVERED = 40
_ENDS = ("delivered", "pending", "parked", "evicted", "discarded", "expired")
_SCRIPT = """
import glob, os, random, sys
path = sys.argv[1]
garbage = random.Random(sys.argv[2]).randbytes
size = os.path.getsize(path)
page = int.from_bytes(open(path, "rb").read(18)[16:], "big")
def write(offset, what):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(what)
"""


def damage(kit: OutboxKit, how: str, *, seed: float = 0) -> None:
    """Do *how* to the file, in a process of its own: closing a file drops this process's locks on it."""
    command = [sys.executable, "-c", _SCRIPT + how, str(kit.directory / "outbox.db"), str(seed)]
    subprocess.run(command, check=True)


def strike(kit: OutboxKit, offset: int, length: int) -> None:
    """Write garbage over part of the file of an outbox that is closed, which needs no process of its own."""
    with (kit.directory / "outbox.db").open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5\x0d\x00\xff" * (length // 4))


def root_pages(kit: OutboxKit) -> dict[str, int]:
    """Return the first page of every table and index, of an outbox that is closed."""
    with closing(sqlite3.connect(kit.directory / "outbox.db")) as connection:
        return dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0"))


def set_aside(kit: OutboxKit) -> list[str]:
    """Return the main files that were set aside."""
    names = (path.name for path in kit.directory.iterdir())
    return sorted(name for name in names if re.fullmatch(r"outbox\.db\.damaged-[^-]*Z(-\d+)?", name))


def assert_totals_hold(outbox: Outbox, kit: OutboxKit) -> None:
    def count(connection: sqlite3.Connection) -> list[tuple[str, str, int]]:
        return connection.execute("SELECT sink, state, COUNT(*) FROM deliveries GROUP BY sink, state").fetchall()

    rows = outbox.read(count).result()  # the outbox's own read: a page of the file may be damaged that it has in memory
    counted = {(sink, state): count for sink, state, count in rows}
    for sink, totals in kit.totals(outbox).items():
        assert totals["accepted"] == sum(totals[state] for state in _ENDS), totals
        assert totals["pending"] == counted.get((sink, "pending"), 0)
        assert totals["parked"] == counted.get((sink, "parked"), 0)


def checkpoint(outbox: Outbox, *, forget: bool = False) -> None:
    """Bring everything from the -wal into the file; *forget* what was read of it, as a big outbox would."""

    def work(store: Storage) -> None:
        store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if forget:
            store.connection.execute("PRAGMA shrink_memory")

    outbox.exclusive(work).result()


def prepared(kit: OutboxKit) -> Outbox:
    """Return an outbox with records of which sink a got some, and sink b none."""
    outbox = kit.open()
    outbox.identify(VmIdentity(name="vm_0", vm_id="1")).result()
    kit.fill(outbox, COUNT, size=1000)
    kit.settle(outbox, "a", *range(1, DELIVERED + 1))
    kit.settle(outbox, "a", DELIVERED + 1, state="parked")
    return outbox


def keep_working(kit: OutboxKit, outbox: Outbox) -> list[int]:
    """Do what an agent does all day; return the sequences of the new records."""
    new = [record.sequence for record in kit.commit(outbox, kit.event("N-1"), kit.event("N-2"), document=Document())]
    kit.due(outbox, "a", limit=64)
    outbox.read(deliveries.probe, "b").result()
    outbox.read(deliveries.urgency, "b", now=kit.time.timestamp()).result()
    outbox.tend().result()
    kit.settle(outbox, "b", new[0], state=None)
    outbox.clean().result()
    new += [record.sequence for record in kit.commit(outbox, kit.event("N-3"), document=Document())]
    outbox.tend().result()
    return new


def whole_due(outbox: Outbox, kit: OutboxKit, new: list[int]) -> list[int]:
    """Return what of the old is due to sink b, after making sure of the new."""
    due = kit.due(outbox, "b")
    assert due[-len(new) :] == new
    assert len(set(due)) == len(due)
    return due[: -len(new)]
