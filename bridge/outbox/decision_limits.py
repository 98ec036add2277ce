"""The bounds of decisions: at most 16 open ones an event and key, and no more bytes than their part of the outbox.

No bound by age or size of the records takes a decision away, so a key that signs without end, by mistake or in a
thief's hands, would fill the disk and evict every record, and each turn of the approver would read all of it. Of one
key the newest decisions on an event count, so the older ones can go; its newest hold stays in any case, and so does
what an approval on its way to Azure stands on.

When the decisions need more room than is theirs, those that are followed or refused go first, then open approvals of
events that this VM does not have, then holds of such events. What the portal still has comes again after a restart, and
what it was superseded by is still here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence

import msgspec

from bridge.outbox.approvals import DecisionStage, KeepResult, StoredDecision
from bridge.outbox.database import SQL, is_in_memory, used_bytes
from bridge.outbox.meta import document_of, read_meta

MOST_OPEN_DECISIONS = 16
"""Of one key on one event."""
_MOST_BYTES = 8 * 1024 * 1024
_PART = 0.5
#: Room is made down to this part of what is theirs: not with every single decision.
_TARGET = 0.9
_SURPLUS = "The key signed more than 16 decisions on this event; the newest count."


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """An open decision that does not count any more."""

    approver: str
    decision_id: str
    event_id: str
    why: KeepResult


def limit_decisions(connection: sqlite3.Connection, kept: Sequence[StoredDecision], *, max_bytes: int) -> list[GivenUp]:
    """Keep the decisions of an outbox of *max_bytes* within their bounds after *kept* came; return what was open."""
    if is_in_memory(connection):
        return []
    given_up: list[GivenUp] = []
    for key in dict.fromkeys((each.event_id, each.source, each.approver, each.kid) for each in kept):
        given_up += _close_surplus(connection, *key)
    given_up += _make_room(connection, min(max_bytes * _PART, _MOST_BYTES))
    return given_up


def _close_surplus(
    connection: sqlite3.Connection, event_id: str, source: str, approver: str, kid: str | None
) -> Iterator[GivenUp]:
    arguments = {"event_id": event_id, "source": source, "approver": approver, "kid": kid}
    rows = connection.execute(SQL["open_decisions_of_key"], arguments).fetchall()
    if len(rows) <= MOST_OPEN_DECISIONS:
        return
    newest_hold = next((arrival for arrival, _, verdict, _ in rows if verdict == "hold"), None)
    must_stay = {arrival for arrival, _, _, is_needed in rows if is_needed or arrival == newest_hold}
    may_stay = [arrival for arrival, *_ in rows if arrival not in must_stay]
    stay = must_stay.union(may_stay[: max(MOST_OPEN_DECISIONS - len(must_stay), 0)])
    for arrival, decision_id, *_ in rows:
        if arrival not in stay:
            change = (DecisionStage.REFUSED.value, "superseded", _SURPLUS, arrival)
            connection.execute(SQL["update_decision"], change)
            yield GivenUp(approver=approver, decision_id=decision_id, event_id=event_id, why=KeepResult.SURPLUS)


def _make_room(connection: sqlite3.Connection, limit_bytes: float) -> Iterator[GivenUp]:
    """Delete decisions until they use less than *limit_bytes*; yield those that were open."""
    if used_bytes(connection) <= limit_bytes:
        return
    (used,) = connection.execute(SQL["decision_bytes"]).fetchone()
    if used <= limit_bytes:
        return
    document = document_of(read_meta(connection))
    active = json.dumps([] if document is None else [event.event_id for event in document.events])
    for arrival, approver, decision_id, event_id, is_open, size in connection.execute(
        SQL["droppable_decisions"], (active,)
    ).fetchall():
        connection.execute(SQL["delete_decision"], (arrival,))
        used -= size
        if is_open:
            yield GivenUp(approver=approver, decision_id=decision_id, event_id=event_id, why=KeepResult.NO_ROOM)
        if used <= limit_bytes * _TARGET:
            return
