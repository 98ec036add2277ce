"""What comes from the portal: tokens in, kept decisions or counted refusals out.

A token is verified and its decision kept before anything else is looked at, on the thread that brought it: a stranger's
forgeries cost nobody else anything, and what is kept survives the next moment. While this VM's id is not known or the
outbox lives in memory, tokens wait here, as many as two answers of the portal may hold: after a restart the portal
gives all of them again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime

from bridge.approval.evaluate import Refusal
from bridge.approval.token import Claims, verify
from bridge.clock import parse_time
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import KeyUnusable, OutboxError, OutboxReadOnly, RefusalReason, RefusedDecision
from bridge.outbox import approvals
from bridge.outbox.approvals import StoredDecision
from bridge.outbox.outbox import Outbox

_MOST_WAITING = 2_000


class DecisionInbox:
    """Verifies tokens with *keys* and keeps their decisions; *refuse* hears of the others."""

    def __init__(
        self,
        keys: Sequence[TrustedKey],
        outbox: Outbox,
        *,
        vm_id: Callable[[], str | None],
        refuse: Callable[[Refusal], None],
        now: Callable[[], datetime],
    ) -> None:
        self._keys = tuple(keys)
        self._outbox = outbox
        self._vm_id = vm_id
        self._refuse = refuse
        self._now = now
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)

    def offer(self, tokens: Sequence[str]) -> None:
        """Keep the decisions in *tokens*, or let them wait; raise nothing that a token can cause."""
        vm_id = self._vm_id()
        if not vm_id or self._outbox.in_memory:
            with self._lock:
                self._waiting.extend(tokens)
            return
        try:
            self._keep(tokens, vm_id)
        except OutboxReadOnly:
            with self._lock:
                self._waiting.extend(tokens)

    @property
    def has_waiting(self) -> bool:
        """Return whether tokens wait."""
        return bool(self._waiting)

    def offer_waiting(self) -> None:
        """Try again what waits."""
        with self._lock:
            tokens = list(self._waiting)
            self._waiting.clear()
        if tokens:
            self.offer(tokens)

    def is_trusted(self, decision: StoredDecision) -> bool:
        """Return whether the key behind a kept decision still counts; a local decision has none."""
        if decision.source == "cli":
            return True
        for key in self._keys:
            if key.kid == decision.kid and key.approver == decision.approver:
                try:
                    return key.load().sha256 == decision.key_sha256
                except KeyUnusable:
                    return False
        return False

    def _keep(self, tokens: Sequence[str], vm_id: str) -> None:
        created_at = parse_time(self._outbox.read(approvals.made_at).result())
        verified: list[Claims] = []
        for token in tokens:
            try:
                decision = verify(token, keys=self._keys, audience=vm_id, now=self._now(), created_at=created_at)
                verified.append(decision)
            except RefusedDecision as refused:
                self._refused(refused)
        if not verified:
            return
        kept = [self._kept(claims) for claims in verified]
        results = self._outbox.write(approvals.keep_decisions, kept).result()
        for decision_kept, result in zip(kept, results, strict=True):
            if result == "replayed":
                self._say(decision_kept, RefusalReason.REPLAYED, "Its jti was used before for something else.")
            elif result == "too_old":
                why = "It was issued before the outbox was made."
                self._say(decision_kept, RefusalReason.ISSUED_BEFORE_THIS_OUTBOX, why)

    def _refused(self, refused: RefusedDecision) -> None:
        if self._is_known(refused):
            return  # it counted when it came; that it would not any more is no news
        self._refuse(
            Refusal(
                reason=refused.reason.value,
                said=str(refused),
                source="portal",
                decision_id=refused.decision_id,
                approvers=() if refused.approver is None else (refused.approver,),
                event_id=refused.event_id,
            )
        )

    def _is_known(self, refused: RefusedDecision) -> bool:
        if refused.approver is None or refused.decision_id is None or refused.payload_sha256 is None:
            return False
        try:
            return self._outbox.read(
                approvals.is_known,
                approver=refused.approver,
                decision_id=refused.decision_id,
                payload_sha256=refused.payload_sha256,
            ).result()
        except OutboxError:
            return False

    def _say(self, decision: StoredDecision, reason: RefusalReason, why: str) -> None:
        self._refuse(
            Refusal(
                reason=reason.value,
                said=f"The decision {decision.decision_id} signed by {decision.approver} does not count. {why}",
                source="portal",
                decision_id=decision.decision_id,
                approvers=(decision.approver,),
                event_id=decision.event_id,
            )
        )

    def _kept(self, claims: Claims) -> StoredDecision:
        return StoredDecision(
            source="portal",
            approver=claims.approver,
            kid=claims.kid,
            key_sha256=claims.key_sha256,
            decision_id=claims.decision_id,
            payload_sha256=claims.payload_sha256,
            event_id=claims.event_id,
            event_digest=claims.event_digest,
            verdict=claims.verdict.value,
            issued_at=_microseconds(claims.issued_at),
            expires_at=claims.expires_at.timestamp(),
            reason=claims.reason,
            received_at=self._now().timestamp(),
        )


def _microseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000)
