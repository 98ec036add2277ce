"""The bounds of decisions: at most 16 open ones an event and key, and no more bytes than their part of the outbox.

No bound by age or size of the records takes a decision away, so a key that signs without end, by mistake or in a
thief's hands, would fill the disk and evict every record, and each turn of the approver would read all of it. Of one
key the newest decisions on an event count, so the older ones can go; its newest hold stays in any case, and so does
what an approval on its way to Azure stands on.

When the decisions need more room than is theirs, the key that takes the most gives, so that no key can push out what
another one signed: neither a hold, nor an approval that was refused and would count anew if it were forgotten. Of that
key go first the approvals that are followed or refused, then the open ones, both of events that this VM does not have,
then what is followed or refused of events that it has, and last the holds of events that it does not have. Before all
of that go holds that are over, since to hold again does no harm. What the portal still has comes again after a restart.
"""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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


class _Droppable(NamedTuple):
    """A decision that may be deleted to make room; those of the lowest rank go first."""

    arrival: int
    source: str
    approver: str
    kid: str | None
    decision_id: str
    event_id: str
    is_open: int
    rank: int
    size: int

    @property
    def key(self) -> tuple[str, str, str | None]:
        """Return who signed it, and with what."""
        return self.source, self.approver, self.kid


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
    rows = (_Droppable(*row) for row in connection.execute(SQL["droppable_decisions"], (active,)).fetchall())
    for each in _in_turn(rows):
        connection.execute(SQL["delete_decision"], (each.arrival,))
        used -= each.size
        if each.is_open:
            yield GivenUp(
                approver=each.approver, decision_id=each.decision_id, event_id=each.event_id, why=KeepResult.NO_ROOM
            )
        if used <= limit_bytes * _TARGET:
            return


def _in_turn(rows: Iterable[_Droppable]) -> Iterator[_Droppable]:
    """Yield *rows* in the order in which they go: what costs nothing, then always of the key that has the most."""
    by_key: dict[tuple[str, str, str | None], deque[_Droppable]] = {}
    sizes: dict[tuple[str, str, str | None], int] = {}
    for each in rows:
        if each.rank == 0:
            yield each
        else:
            by_key.setdefault(each.key, deque()).append(each)
            sizes[each.key] = sizes.get(each.key, 0) + each.size
    while sizes:
        key = max(sizes, key=sizes.__getitem__)
        each = by_key[key].popleft()
        sizes[key] -= each.size
        if not by_key[key]:
            del sizes[key]
        yield each
