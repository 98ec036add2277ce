"""What the outbox remembers besides records: the last document, the identity, the time and boot of the last answer.

One value a key, as text, in the same transaction as the records that follow from it. Functions over a connection, so
that a command beside the agent reads them just as the agent does.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Mapping
from datetime import datetime

import msgspec

from bridge.clock import format_time, parse_time
from bridge.events.event import Document, VmIdentity, decode_document, encode
from bridge.outbox.database import SQL, TrackedConnection, transaction

DISABLED_BY = "approvals_disabled_by"
"""The key of the owner of the file ``approvals.disabled``, as the last record told it; empty: it told that it went."""

AWAITS_PORTAL = "awaits_portal"
CREATED_AT_CORRECTED = "created_at_corrected"
"""The key of when the database counts as made while the clock is before ``created_at``; empty: it is not."""
DECISION_CHANGES = "decision_changes"
"""The key of how often decisions and approvals were written: a file that knows of fewer has lost some."""
DOUBT = "doubt"
"""The key of the `DoubtMark`; empty: this machine is the one that is stored."""


class DoubtMark(msgspec.Struct, frozen=True, kw_only=True):
    """Where what this machine told begins, behind what may be another's; kept as JSON under these names.

    It outlives a restart, and ends with `bridge.outbox.doubt.Doubt.end`.
    """

    through: int
    """The last sequence of what may be another machine's."""
    known: tuple[str, ...] = ()
    """The keys of the events in the document of then."""
    stored_good_at: str | None = None
    """``last_good_at`` of then. With another one stored the mark is over: a version that knows no marks was at work."""
    boot_id: str
    """The boot in which it began. Of another one it counts no more: the mark itself may have come with an image."""
    last_good_at: datetime | None = None
    """When IMDS last answered in that boot; None: not since the doubt began."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """What the outbox remembers from before."""

    stream_id: str
    document: Document | None
    last_good_at: datetime | None
    boot_id: str | None
    """The boot of `last_good_at`."""
    vm: VmIdentity | None
    vm_boot_id: str | None
    """The last boot of which it is sure that it is one of `vm`."""


def load(connection: sqlite3.Connection) -> SavedState:
    """Return all of it; raise sqlite3.DatabaseError for a value that makes no sense."""
    meta = read_meta(connection)
    try:
        mark = doubt_of(meta)
        good_at = parse_time(meta["last_good_at"]) if "last_good_at" in meta else None
        boot_id = meta.get("boot_id")
        if mark is not None and mark.last_good_at is not None:
            good_at, boot_id = mark.last_good_at, mark.boot_id
        return SavedState(
            stream_id=meta["stream_id"],
            document=document_of(meta),
            last_good_at=good_at,
            boot_id=boot_id,
            vm=vm_of(meta),
            vm_boot_id=meta.get("boot_id"),
        )
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise sqlite3.DatabaseError(f"What the outbox remembers is malformed: {error!r}") from error


def begin_stream(connection: sqlite3.Connection, moment: datetime) -> bool:
    """Give a new outbox its stream; one that has a stream keeps it. Return whether it is new."""
    if get(connection, "stream_id") is not None:
        return False
    with transaction(connection):
        forget_decisions(connection, moment)
        change_stream(connection)
    return True


def change_stream(connection: sqlite3.Connection) -> None:
    """Have what follows belong to a stream of its own; its sequences go on."""
    put(connection, "stream_id", str(uuid.uuid4()))


def forget_decisions(connection: sqlite3.Connection, moment: datetime) -> None:
    """Have the database count as made at *moment*, without decisions from before, of which holds may be missing."""
    put(connection, "created_at", format_time(moment))
    if get(connection, CREATED_AT_CORRECTED):
        put(connection, CREATED_AT_CORRECTED, "")
    await_portal(connection)


def await_portal(connection: sqlite3.Connection) -> None:
    """Note that holds may be missing that a portal has."""
    put(connection, AWAITS_PORTAL, "1")


def created_at(meta: Mapping[str, str]) -> datetime:
    """Return when the database counts as made: no approval from before is accepted."""
    return parse_time(meta.get(CREATED_AT_CORRECTED) or meta["created_at"])


def count_decision_change(connection: sqlite3.Connection) -> None:
    """Count one more write of decisions or approvals, in its transaction."""
    put(connection, DECISION_CHANGES, str(int(get(connection, DECISION_CHANGES) or 0) + 1))


def next_sequence(meta: Mapping[str, str]) -> int:
    """Return the sequence that the next record gets."""
    return int(meta.get("next_sequence") or 1)


def decision_changes(meta: Mapping[str, str]) -> int:
    """Return how often decisions and approvals were written."""
    return int(meta.get(DECISION_CHANGES) or 0)


def note_portal_read(connection: sqlite3.Connection, made_at: datetime) -> None:
    """Note that the portal gave all of its decisions to the database made at *made_at*, if this is it."""
    known = read_meta(connection)
    if created_at(known) == made_at and awaits_portal(known):
        put(connection, AWAITS_PORTAL, "0")


def awaits_portal(meta: Mapping[str, str]) -> bool:
    """Return whether holds may be missing that the portal has: it has not given all of its decisions yet."""
    return meta.get(AWAITS_PORTAL) == "1"


def save_liveness(connection: sqlite3.Connection, *, last_good_at: datetime, boot_id: str) -> None:
    """Store when IMDS last answered, and under which boot."""
    put(connection, "last_good_at", format_time(last_good_at))
    put(connection, "boot_id", boot_id)


def save_vm(connection: sqlite3.Connection, vm: VmIdentity) -> None:
    """Store who this VM is."""
    if get(connection, "vm") != (text := encode(vm).decode()):
        put(connection, "vm", text)


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """Return every value by its key."""
    return dict(connection.execute(SQL["get_meta"]))


def get(connection: sqlite3.Connection, key: str) -> str | None:
    """Return one value, None when there is none."""
    row = connection.execute(SQL["get_one_meta"], (key,)).fetchone()
    return None if row is None else str(row[0])


def put(connection: sqlite3.Connection, key: str, value: str) -> None:
    """Store one value."""
    connection.execute(SQL["put_meta"], (key, value))
    if isinstance(connection, TrackedConnection):
        connection.meta_changed = True


def document_of(meta: Mapping[str, str]) -> Document | None:
    """Return the last document in *meta*."""
    return decode_document(meta["document"]) if "document" in meta else None


def vm_of(meta: Mapping[str, str]) -> VmIdentity | None:
    """Return the identity in *meta*."""
    return msgspec.json.decode(meta["vm"], type=VmIdentity) if "vm" in meta else None


def doubt_of(meta: Mapping[str, str]) -> DoubtMark | None:
    """Return the mark in *meta* of a doubt that is open."""
    text = meta.get(DOUBT)
    mark = msgspec.json.decode(text, type=DoubtMark) if text else None
    return mark if mark is not None and mark.stored_good_at == meta.get("last_good_at") else None


def vm_id_of(meta: Mapping[str, str]) -> str | None:
    """Return the vmId in *meta*, in lower case."""
    vm = vm_of(meta)
    return None if vm is None or vm.vm_id is None else vm.vm_id.lower()
