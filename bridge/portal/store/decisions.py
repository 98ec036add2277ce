"""Stores signed decisions, numbered in commit order.

The long poll does not read this table, because `bridge.portal.pending_decisions` keeps valid decisions in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
from sqlalchemy import Connection, exists, func, select

from bridge.approval.decision_token import Claims
from bridge.clock import format_time
from bridge.portal.audit import Entry
from bridge.portal.fleet import key_of_event_id
from bridge.portal.schema import counters, decisions, events
from bridge.portal.store.audit import add_entries, next_values
from bridge.portal.store.database import announce, rows_in

_COUNTER = "decisions"
_HOLD = "hold"


class NewDecision(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decision with a valid signature. Each field is a column of the `decisions` table."""

    vm_key: str
    event_key: str
    decision: str
    jws: str
    issued_at_seconds: float
    expires_at_seconds: int
    verdict_id: str | None = None
    """The newest verdict behind the decision, or None if the decision was signed elsewhere."""

    @cached_property
    def jws_sha256(self) -> str:
        """Return the hash that identifies the decision in outcome records."""
        return hashlib.sha256(self.jws.encode()).hexdigest()


def add_decisions(connection: Connection, signed: Mapping[str, Claims], *, at: str) -> dict[str, int]:
    """Store decisions signed outside the portal. *signed* maps each token to its claims.

    The function adds one audit entry per approver, event, and choice. It returns a dictionary that maps the SHA-256
    hash of each decision to its number.
    """
    new = [
        NewDecision(
            vm_key=claims.audience.lower(),
            event_key=key_of_event_id(claims.event_id),
            decision=claims.verdict.value,
            jws=token,
            issued_at_seconds=claims.issued_at.timestamp(),
            expires_at_seconds=math.ceil(claims.expires_at.timestamp()),
        )
        for token, claims in signed.items()
    ]
    numbers, stored = insert_decisions(connection, new, at=at)
    together = defaultdict[tuple[str, str, str], list[NewDecision]](list)
    for each in stored:
        together[signed[each.jws].approver, each.decision, each.event_key].append(each)
    add_entries(connection, [_entry(some, signed) for some in together.values()], at=at)
    return numbers


def insert_decisions(
    connection: Connection, new: Sequence[NewDecision], *, at: str
) -> tuple[dict[str, int], list[NewDecision]]:
    """Store new decisions.

    Returns a dictionary that maps the SHA-256 hash of each decision to its number, and a list of the decisions that are
    new.
    """
    by_hash = {each.jws_sha256: each for each in new}
    next_values(connection, _COUNTER, 0)  # lock the counter before the audit counter
    query = select(decisions.c.jws_sha256, decisions.c.decision_index)
    numbers = {sha256: int(index) for sha256, index in rows_in(connection, query, decisions.c.jws_sha256, by_hash)}
    missing = [sha256 for sha256 in by_hash if sha256 not in numbers]
    if not missing:
        return numbers, []
    first = next_values(connection, _COUNTER, len(missing)) - len(missing) + 1
    numbers |= {sha256: first + offset for offset, sha256 in enumerate(missing)}
    rows = [
        {**msgspec.structs.asdict(by_hash[key]), "decision_index": numbers[key], "jws_sha256": key, "made_at": at}
        for key in missing
    ]
    connection.execute(decisions.insert(), rows)
    announce(connection, first + len(missing) - 1)
    return numbers, [by_hash[sha256] for sha256 in missing]


def decision_hashes(signed: Sequence[NewDecision]) -> dict[str, str]:
    """Return the SHA-256 of each decision by its VM, for the audit."""
    return {each.vm_key: each.jws_sha256 for each in signed}


def newest_iat(connection: Connection, event_key: str) -> float:
    """Return the newest `iat` of the event's decisions, in seconds.

    The `iat` of the next decision must not be earlier.
    """
    query = select(func.max(decisions.c.issued_at_seconds)).where(decisions.c.event_key == event_key)
    return float(connection.execute(query).scalar_one() or 0.0)


def live_decisions(
    connection: Connection, *, now_seconds: float, after: int = 0
) -> tuple[int, Sequence[tuple[int, str, str]]]:
    """Return the last number, and the valid decisions with a number above *after*.

    Each decision is a tuple of its number, VM, and token. While an event is open, holds on it stay valid even after
    they expire.
    """
    index = int(connection.execute(select(counters.c.value).where(counters.c.name == _COUNTER)).scalar_one())
    is_open = exists().where(events.c.event_key == decisions.c.event_key, events.c.is_open.is_(True))
    # Round down, because PostgreSQL would round to the nearest second.
    is_valid = (decisions.c.expires_at_seconds > math.floor(now_seconds)) | ((decisions.c.decision == _HOLD) & is_open)
    query = select(decisions.c.decision_index, decisions.c.vm_key, decisions.c.jws)
    query = query.where(decisions.c.decision_index > after, is_valid).order_by(decisions.c.decision_index)
    return index, [(row.decision_index, row.vm_key, row.jws) for row in connection.execute(query)]


def _entry(stored: Sequence[NewDecision], signed: Mapping[str, Claims]) -> Entry:
    first = signed[stored[0].jws]
    details = {
        "event_id": first.event_id,
        "event_digest": first.event_digest,
        "kid": first.kid,
        "reason": first.reason,
        "issued_at": format_time(first.issued_at),
        "expires_at": format_time(first.expires_at),
        "jti": [signed[each.jws].decision_id for each in stored],
        "decisions": decision_hashes(stored),
    }
    action = f"decided_{first.verdict.value}"
    return Entry(actor=first.approver, action=action, subject=stored[0].event_key, details=details)
