"""The inbox verifies tokens from the portal and stores their decisions in the outbox.

Verification runs on the portal poller's thread, so that a flood of forged tokens cannot delay polling or delivery. For
each invalid token, the inbox returns a refusal record.

If the inbox cannot verify or store a token because of a problem on this VM, the token waits for another attempt
(`_Wait`). At most 2,000 tokens can wait. Beyond this limit, the inbox first drops tokens that do not block any
approval, and then tokens whose key file is broken. If more than 2,000 tokens cannot be stored, the inbox raises an
error, and the portal must resend the tokens.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from bridge.approval.changes import ApprovalRecord, refusal_of
from bridge.approval.decision_token import MAX_LIFETIME_SECONDS, Claims, RefusedDecision, verify
from bridge.approval.evaluate import Trust
from bridge.approval.refusal_reasons import RefusalReason
from bridge.clock import REAL_CLOCK, Clock
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import KeyMissing, KeyUnusable, OutboxError
from bridge.events.event import ScheduledEvent, VmIdentity
from bridge.events.record import Approval, Transition, Verdict
from bridge.logs import ThrottledLog
from bridge.outbox import approvals
from bridge.outbox.approvals import MOST_OPEN_DECISIONS
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import StoredDecision

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 2.0
_MOST_WAITING = 2_000
_RETRY_SECONDS = 1.0
_REPLAYED = "Its jti was used for another decision."
_SURPLUS = f"Its key has more than {MOST_OPEN_DECISIONS:,} open decisions."


class _Wait(IntEnum):
    """The reason why the inbox cannot process a token yet.

    If too many tokens are waiting, the inbox drops tokens with a lower value first.
    """

    LATER = 1
    """The key file does not exist, or the approve decision is not valid yet. The token blocks no approval."""
    BROKEN_KEY = 2
    """The key file exists but is not valid. Another program may be writing the file. No rule acts."""
    UNKEPT = 3
    """The vmId is unknown or the outbox is not saved, so the decision is not stored yet. Because it may be a hold, the
    agent does not approve anything."""


class DecisionInbox:
    """Verifies tokens with *keys* and stores their decisions. *vm* returns this VM's identity."""

    def __init__(
        self,
        keys: Sequence[TrustedKey],
        outbox: Outbox,
        *,
        vm: Callable[[], VmIdentity],
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._keys = tuple(keys)
        self._outbox = outbox
        self._vm = vm
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        self._lock = threading.Lock()
        self._waiting: dict[str, _Wait] = {}
        """The dictionary is replaced and never modified, because several threads read it."""
        self._retry_at = -math.inf

    def receive(self, tokens: Sequence[str], events: Mapping[str, ScheduledEvent]) -> list[ApprovalRecord]:
        """Verify *tokens*, store the decisions, and return records for the refused tokens.

        *events* maps each EventId to its current event. If too many tokens are waiting, the method raises OutboxError,
        and the portal must resend the tokens.
        """
        refusals, waits = self._keep(tokens, self._waiting, events)
        judged = frozenset(tokens)
        with self._lock:
            waiting = {token: why for token, why in self._waiting.items() if token not in judged} | waits
            if sum(why is _Wait.UNKEPT for why in waiting.values()) > _MOST_WAITING:
                raise OutboxError(f"More than {_MOST_WAITING:,} decisions are waiting to be stored.")
            surplus = max(len(waiting) - _MOST_WAITING, 0)
            for token in sorted(waiting, key=waiting.__getitem__)[:surplus]:
                del waiting[token]
            self._waiting = waiting
        return refusals

    def receive_waiting(self, events: Mapping[str, ScheduledEvent]) -> list[ApprovalRecord]:
        """Retry the waiting tokens, at most once per second. Return records of refused tokens."""
        waiting = list(self._waiting)
        if not waiting or self._clock.monotonic() < self._retry_at:
            return []
        self._retry_at = self._clock.monotonic() + _RETRY_SECONDS
        return self.receive(waiting, events)

    @property
    def has_waiting(self) -> bool:
        """Return whether any tokens are waiting."""
        return bool(self._waiting)

    @property
    def has_unkept(self) -> bool:
        """Return whether a token waits because its decision is not saved."""
        return _Wait.UNKEPT in self._waiting.values()

    @property
    def awaits_key(self) -> bool:
        """Return whether a token waits for a key file that exists but is not valid."""
        return _Wait.BROKEN_KEY in self._waiting.values()

    def trust(self, decision: StoredDecision) -> Trust:
        """Return the trust in a stored decision's key. A decision made on the VM needs no key."""
        if decision.source == "cli":
            return Trust.KEPT
        for key in self._keys:
            if key.kid == decision.kid and key.approver == decision.approver:
                try:
                    return Trust.KEPT if key.load().sha256 == decision.key_sha256 else Trust.REVOKED
                except KeyMissing:
                    return Trust.REVOKED
                except KeyUnusable as error:
                    message = (
                        f"{error} The agent does not follow decisions signed with this key until you fix the problem."
                    )
                    self._log.problem(key.kid, logging.ERROR, message)
                    return Trust.UNKNOWN
        return Trust.REVOKED

    def _keep(
        self, tokens: Sequence[str], before: Mapping[str, _Wait], events: Mapping[str, ScheduledEvent]
    ) -> tuple[list[ApprovalRecord], dict[str, _Wait]]:
        vm_id = self._vm().vm_id
        if not vm_id or not self._outbox.is_trusted or self._outbox.is_behind:
            return [], dict.fromkeys(tokens, _Wait.UNKEPT)
        created_at = self._outbox.created_at()
        decisions: list[StoredDecision] = []
        refusals: list[ApprovalRecord] = []
        waits: dict[str, _Wait] = {}
        for token in tokens:
            try:
                claims = verify(token, keys=self._keys, audience=vm_id, now=self._clock.now(), created_at=created_at)
                decisions.append(self._stored(token, claims))
            except RefusedDecision as refused:
                why = _why_it_waits(refused)
                if why is not None:
                    waits[token] = why
                if (why is None or before.get(token) is not why) and not self._is_known(refused):
                    refusals.append(_refusal(refused, events))
        if decisions:
            replayed, closed = self._outbox.change(approvals.keep_decisions, decisions)
            not_kept = [(each, RefusalReason.REPLAYED, _REPLAYED) for each in replayed]
            not_kept += [(each, RefusalReason.SUPERSEDED, _SURPLUS) for each in closed]
            for decision, reason, explained in not_kept:
                message = (
                    f"The decision {decision.decision_id} signed by {decision.approver} does not count. {explained}"
                )
                refusals.append(refusal_of(decision, reason, message, events.get(decision.event_id)))
            if not self._outbox.wait_saved(_SAVE_SECONDS):
                waits.update((each.token or "", _Wait.UNKEPT) for each in decisions)
        return refusals, waits

    def _is_known(self, refused: RefusedDecision) -> bool:
        """Return whether the decision is stored. If so, its later expiry is not a refusal."""
        claims = refused.claims
        if claims is None:
            return False
        known = self._outbox.read(approvals.find_decision, "portal", claims.approver, claims.decision_id)
        return known is not None and known.payload_sha256 == claims.payload_sha256

    def _stored(self, token: str, claims: Claims) -> StoredDecision:
        return StoredDecision(
            source="portal",
            approver=claims.approver,
            kid=claims.kid,
            key_sha256=claims.key_sha256,
            decision_id=claims.decision_id,
            payload_sha256=claims.payload_sha256,
            token=token,
            event_id=claims.event_id,
            event_digest=claims.event_digest,
            verdict=claims.verdict,
            issued_at=round(claims.issued_at.timestamp() * 1_000_000),
            expires_at=self._kept_until(claims),
            reason=claims.reason,
            received_at=self._clock.timestamp(),
        )

    def _kept_until(self, claims: Claims) -> float:
        """Return when the outbox can delete the decision: at ``exp``, or after a day for a hold.

        The agent accepts a hold even after the hold's ``exp``. The outbox never deletes a hold while the event exists.
        """
        if claims.verdict is not Verdict.HOLD:
            return claims.expires_at.timestamp()
        return max(claims.issued_at.timestamp(), self._clock.timestamp()) + MAX_LIFETIME_SECONDS


def _why_it_waits(refused: RefusedDecision) -> _Wait | None:
    if refused.reason is RefusalReason.KEY_UNUSABLE:
        return _Wait.LATER if isinstance(refused.__cause__, KeyMissing) else _Wait.BROKEN_KEY
    return _Wait.LATER if refused.reason is RefusalReason.NOT_YET_VALID else None


def _refusal(refused: RefusedDecision, events: Mapping[str, ScheduledEvent]) -> ApprovalRecord:
    claims = refused.claims
    approval = Approval(
        source="portal",
        decision_id=None if claims is None else claims.decision_id,
        approvers=() if refused.approver is None else (refused.approver,),
        reason=str(refused),
        result=refused.reason.value,
    )
    event = None if claims is None else events.get(claims.event_id)
    return ApprovalRecord(transition=Transition.APPROVAL_REFUSED, event=event, approval=approval)
