"""Stores decisions, holds, and approvals in `State`. No function performs I/O.

The agent stores each decision before acting on it. It also keeps the ID (jti) of each expired decision, because the
portal might send the decision again.

If an event changes, its approvals become invalid, because an approval applies to only one version of an event. Holds
remain in force, because a hold applies to every version of its event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import msgspec

from bridge.errors import StreamChanged
from bridge.events.record import Verdict
from bridge.outbox.rows import (
    OPEN_DECISIONS,
    ApprovalStage,
    ApprovalState,
    DecisionStage,
    DecisionUpdate,
    PendingApproval,
    StoredDecision,
)
from bridge.outbox.state import State

DISABLED_FILE = "approvals.disabled"
MOST_OPEN_DECISIONS = 1_000
"""The limit for each signing key. Above this limit, the agent closes the oldest approve decisions, and then holds."""
_SURPLUS = f"The key has more than {MOST_OPEN_DECISIONS:,} open decisions, and this is the oldest approval among them."


def read_state(state: State) -> ApprovalState:
    """Return all open decisions, and all approvals in the order of their last change."""
    decisions = open_decisions(state)
    by_change = sorted(state.approvals.rows.values(), key=lambda each: (each.changed_at, each.key))
    return ApprovalState(
        stream_id=state.get("stream_id") or "",
        decisions=decisions,
        approvals={each.key: each for each in by_change},
        known_event_ids=frozenset(each.event_id for each in decisions if each.event_id in state.events.rows),
    )


def open_decisions(state: State) -> tuple[StoredDecision, ...]:
    """Return the open decisions in the order of arrival. Holds in force are open decisions."""
    return tuple(row for row in state.decisions.rows.values() if row.state in OPEN_DECISIONS)


def find_decision(state: State, source: str, approver: str, decision_id: str) -> StoredDecision | None:
    """Return the decision with this ID (jti), or None."""
    for row in state.decisions.rows.values():
        if row.decision_id == decision_id and (row.source, row.approver) == (source, approver):
            return row
    return None


def token_digests(state: State, arrivals: Iterable[int]) -> tuple[str, ...]:
    """Return the SHA-256 of each signed text. Local decisions are skipped, as they have none."""
    tokens = (row.token for arrival in arrivals if (row := state.decisions.rows.get(arrival)) is not None)
    return tuple(hashlib.sha256(token.encode()).hexdigest() for token in tokens if token is not None)


def keep_decisions(
    state: State, decisions: Sequence[StoredDecision]
) -> tuple[list[StoredDecision], list[StoredDecision]]:
    """Store new decisions. Return the replayed decisions and the closed decisions.

    A replayed decision has the ID (jti) of a stored decision but different content. The function does not store it.

    If a signing key has more than `MOST_OPEN_DECISIONS` open decisions, the function closes the key's oldest approvals
    first, and then its oldest holds.
    """
    replayed = [each for each in decisions if not _keep(state, each)]
    return replayed, [closed for key in dict.fromkeys(map(_key, decisions)) for closed in _close_surplus(state, key)]


def _keep(state: State, decision: StoredDecision) -> bool:
    """Store *decision* if it is new. Return False if its ID belongs to a different decision."""
    known = find_decision(state, decision.source, decision.approver, decision.decision_id)
    if known is not None:
        return known.payload_sha256 == decision.payload_sha256
    arrival = max(int(state.get("last_arrival") or 0), *state.decisions.rows, 0) + 1
    state.put("last_arrival", str(arrival))
    state.decisions.put(msgspec.structs.replace(decision, arrival=arrival))
    return True


def _key(decision: StoredDecision) -> tuple[str, str, str | None]:
    return decision.source, decision.approver, decision.kid


def _close_surplus(state: State, key: tuple[str, str, str | None]) -> list[StoredDecision]:
    of_key = [each for each in open_decisions(state) if _key(each) == key]
    surplus = sorted(of_key, key=lambda each: (each.verdict is Verdict.HOLD, each.issued_at))
    surplus = surplus[: max(len(of_key) - MOST_OPEN_DECISIONS, 0)]
    updates = [
        DecisionUpdate(arrival=each.arrival, state=DecisionStage.REFUSED, outcome="superseded", message=_SURPLUS)
        for each in surplus
    ]
    update_decisions(state, updates)
    return surplus


def keep_overruling(state: State, decision: StoredDecision, overruled: Collection[int]) -> tuple[StoredDecision, ...]:
    """Store a local *decision* that overrules the holds in *overruled*.

    If the event has holds that are not in *overruled*, the function stores nothing and returns these holds.
    """
    holds = [
        each for each in open_decisions(state) if each.event_id == decision.event_id and each.verdict is Verdict.HOLD
    ]
    others = tuple(hold for hold in holds if hold.arrival not in overruled)
    if not others:
        for hold in holds:
            if hold.issued_at >= decision.issued_at:  # the newest decision wins
                state.decisions.put(msgspec.structs.replace(hold, issued_at=decision.issued_at - 1))
        _keep(state, decision)
    return others


def write_changes(
    state: State,
    stream_id: str,
    *,
    approvals: Sequence[PendingApproval] = (),
    decisions: Sequence[DecisionUpdate] = (),
) -> None:
    """Store changes. Raise StreamChanged if *stream_id* is not the current stream."""
    if state.get("stream_id") != stream_id:
        raise StreamChanged("The outbox now belongs to another machine. Approvals are evaluated again.")
    for approval in approvals:
        state.approvals.put(approval)
    update_decisions(state, decisions)


def update_decisions(state: State, updates: Iterable[DecisionUpdate]) -> None:
    """Store the new progress of decisions."""
    for update in updates:
        row = state.decisions.rows.get(update.arrival)
        if row is not None:
            state.decisions.put(msgspec.structs.replace(row, **msgspec.structs.asdict(update)))


def begin_attempt(state: State, stream_id: str, approval: PendingApproval, *, now: float) -> PendingApproval | None:
    """Count an attempt to send an approval, and return the updated approval.

    Returns None if *approval* is no longer wanted or its event has a new hold.
    """
    new_holds = {
        each.event_id
        for each in open_decisions(state)
        if each.verdict is Verdict.HOLD and each.state is DecisionStage.NEW
    }
    known = state.approvals.rows.get(approval.key)
    if known is None or known.state is not ApprovalStage.WANTED or known.event_id in new_holds:
        return None
    begun = msgspec.structs.replace(known, attempts=known.attempts + 1, http_status=None, changed_at=now)
    write_changes(state, stream_id, approvals=[begun])
    return begun
