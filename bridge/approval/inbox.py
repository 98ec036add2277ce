"""The inbox of decisions: verifies the portal's tokens, stores their decisions, and returns refusals for the others.

Tokens are verified and stored on the thread that received them, so forgeries delay no other part. A decision is kept
when it is saved. Until then, its token waits here. These tokens wait, too:

- all tokens, while the vmId of this VM is unknown, the stored state may be another machine's, or the disk is behind
- a token whose key file is unusable, because another program may be writing the file
- an approve decision that is not valid yet (``nbf``, or a clock that is behind)

A fault of this VM therefore does not use up a token. At most 2,000 unread tokens wait. Beyond this limit, the portal
must send them again. At most 2,000 tokens of the other two kinds wait. Beyond this limit, tokens that are not valid yet
are dropped first, because they are no holds, and then tokens of the key with the most waiting tokens.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from bridge.approval.decision_token import MAX_LIFETIME_SECONDS, Claims, read_header, verify
from bridge.approval.evaluation import Refusal, Trust
from bridge.clock import REAL_CLOCK, Clock
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import KeyMissing, KeyUnusable, OutboxError, RefusalReason, RefusedDecision
from bridge.events.event import VmIdentity
from bridge.events.record import Verdict
from bridge.logs import ThrottledLog
from bridge.outbox import approvals
from bridge.outbox.approvals import MOST_OPEN_DECISIONS, KeepResult
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import StoredDecision

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 2.0
_MOST_WAITING = 2_000
_RETRY_SECONDS = 1.0
_NOT_KEPT = {
    KeepResult.REPLAYED: (RefusalReason.REPLAYED, "Its jti was used for another decision."),
    KeepResult.TOO_OLD: (RefusalReason.ISSUED_BEFORE_THIS_OUTBOX, "It was issued before the outbox was created."),
}
_SURPLUS = f"Its key has more than {MOST_OPEN_DECISIONS:,} open decisions."


class _Later(msgspec.Struct, frozen=True, kw_only=True):
    """The condition that a token waits for."""

    kid: str
    counts_from: datetime | None
    """The time from which the token may count; None: the key *kid* must be usable."""


class DecisionInbox:
    """Verifies tokens with *keys* and stores their decisions. *vm* returns the identity of this VM."""

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
        self._waiting: dict[str, None] = {}
        """Tokens that are not verified, or whose decisions are not saved."""
        self._later: dict[str, _Later] = {}

    def receive(self, tokens: Sequence[str]) -> list[Refusal]:
        """Store the decisions in *tokens*, or let the tokens wait; return the refusals.

        Raise OutboxError if too many tokens wait: the portal must send these again. A single token never raises.
        """
        refusals, is_kept = self._keep(tokens)
        if not is_kept:
            with self._lock:
                waiting = {**self._waiting, **dict.fromkeys(tokens)}
                if len(waiting) > _MOST_WAITING:
                    raise OutboxError(f"More than {_MOST_WAITING:,} decisions wait until they can be stored.")
                self._waiting = waiting
        return refusals

    @property
    def has_waiting(self) -> bool:
        """Return whether tokens wait."""
        return bool(self._waiting or self._later)

    def wait_seconds(self) -> float:
        """Return the seconds until waiting tokens are due; infinity without waiting tokens."""
        with self._lock:
            times = [each.counts_from for each in self._later.values() if each.counts_from is not None]
            if self._waiting or len(times) < len(self._later):
                return _RETRY_SECONDS
        return max((min(times) - self._clock.now()).total_seconds(), _RETRY_SECONDS) if times else math.inf

    @property
    def has_unkept(self) -> bool:
        """Return whether tokens wait that are not verified, or whose decisions are not saved."""
        return bool(self._waiting)

    @property
    def awaits_key(self) -> bool:
        """Return whether a token waits for a key file that exists and is unusable."""
        with self._lock:
            kids = {each.kid for each in self._later.values() if each.counts_from is None}
        return any(key.kid in kids and _is_broken(key) for key in self._keys)

    def receive_waiting(self) -> list[Refusal]:
        """Try the waiting tokens again."""
        with self._lock:
            waiting = list(self._waiting)
            kids = {key.kid for key in self._keys if self._later and _is_usable(key)}
            now = self._clock.now()
            later = [
                token
                for token, until in self._later.items()
                if (until.kid in kids if until.counts_from is None else until.counts_from <= now)
            ]
        if not (waiting or later):
            return []
        refusals, is_kept = self._keep(waiting + later)
        if is_kept:
            with self._lock:
                for token in waiting:
                    self._waiting.pop(token, None)
        return refusals

    def trust(self, decision: StoredDecision) -> Trust:
        """Return whether the key behind a stored decision is trusted. A local decision has no key."""
        if decision.source == "cli":
            return Trust.KEPT
        for key in self._keys:
            if key.kid == decision.kid and key.approver == decision.approver:
                try:
                    return Trust.KEPT if key.load().sha256 == decision.key_sha256 else Trust.REVOKED
                except KeyMissing:
                    return Trust.REVOKED
                except KeyUnusable as error:
                    self._log.problem(key.kid, logging.ERROR, f"{error} Decisions of this key wait.")
                    return Trust.UNKNOWN
        return Trust.REVOKED

    def _keep(self, tokens: Sequence[str]) -> tuple[list[Refusal], bool]:
        """Store the decisions in *tokens*; return the refusals, and whether nothing is left to verify or to save."""
        vm_id = self._vm().vm_id
        if not vm_id or not self._outbox.is_trusted or self._outbox.is_behind:
            return [], False
        created_at = self._outbox.created_at()
        decisions: list[StoredDecision] = []
        refusals: list[Refusal] = []
        for token in tokens:
            try:
                claims = verify(token, keys=self._keys, audience=vm_id, now=self._clock.now(), created_at=created_at)
                decisions.append(self._stored(token, claims))
            except RefusedDecision as refused:
                if not (self._waits_already(token, refused) or self._is_known(refused)):
                    refusals.append(_refusal(refused))
        is_kept = True
        if decisions:
            keep, created = approvals.keep_decisions, created_at.timestamp()
            results, given_up = self._outbox.change(keep, decisions, created_at=created)
            refusals += [
                _not_kept(decision, *_NOT_KEPT[result])
                for decision, result in zip(decisions, results, strict=True)
                if result in _NOT_KEPT
            ]
            refusals += [_not_kept(each, RefusalReason.SUPERSEDED, _SURPLUS) for each in given_up]
            is_kept = self._outbox.wait_saved(_SAVE_SECONDS)
        with self._lock:
            for decision in decisions:
                self._later.pop(decision.token or "", None)
            self._limit_later()
        return refusals, is_kept

    def _waits_already(self, token: str, refused: RefusedDecision) -> bool:
        """Let *token* wait if it may count later; return whether it already waited for the same condition."""
        until = None
        if refused.reason is RefusalReason.KEY_UNUSABLE or refused.counts_from is not None:
            until = _Later(kid=str(read_header(token).get("kid")), counts_from=refused.counts_from)
        with self._lock:
            before = self._later.pop(token, None)
            if until is not None:
                self._later[token] = until
        return until is not None and before == until

    def _limit_later(self) -> None:
        """Drop surplus tokens: those that are not valid yet first, and of the key with the most waiting tokens."""
        groups: dict[tuple[bool, str], deque[str]] = {}
        if len(self._later) > _MOST_WAITING:
            for token, until in self._later.items():
                groups.setdefault((until.counts_from is not None, until.kid), deque()).append(token)
        for _ in range(len(self._later) - _MOST_WAITING):
            group = max(groups, key=lambda each: (each[0], len(groups[each])))
            del self._later[groups[group].popleft()]
            if not groups[group]:
                del groups[group]

    def _is_known(self, refused: RefusedDecision) -> bool:
        """Return whether the decision is already stored. That it has expired since then is no refusal."""
        if refused.approver is None or refused.decision_id is None:
            return False
        known = self._outbox.read(approvals.find_decision, "portal", refused.approver, refused.decision_id)
        return known is not None and known.payload_sha256 == refused.payload_sha256

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
        """Return ``exp``. For a hold, which may arrive late, at least a day from now, and at most a day ahead.

        A hold on a known event is kept longer.
        """
        expires_at = claims.expires_at.timestamp()
        if claims.verdict is not Verdict.HOLD:
            return expires_at
        now = self._clock.timestamp()
        longest = max(claims.issued_at.timestamp(), now) + MAX_LIFETIME_SECONDS
        return min(max(expires_at, now + MAX_LIFETIME_SECONDS), longest)


def _is_broken(key: TrustedKey) -> bool:
    try:
        key.load()
    except KeyMissing:
        return False
    except KeyUnusable:
        return True
    return False


def _is_usable(key: TrustedKey) -> bool:
    try:
        key.load()
    except KeyUnusable:
        return False
    return True


def _refusal(refused: RefusedDecision) -> Refusal:
    return Refusal(
        reason=refused.reason,
        message=str(refused),
        source="portal",
        decision_id=refused.decision_id,
        approvers=() if refused.approver is None else (refused.approver,),
        event_id=refused.event_id,
    )


def _not_kept(decision: StoredDecision, reason: RefusalReason, why: str) -> Refusal:
    return Refusal(
        reason=reason,
        message=f"The decision {decision.decision_id} signed by {decision.approver} does not count. {why}",
        source="portal",
        decision_id=decision.decision_id,
        approvers=(decision.approver,),
        event_id=decision.event_id,
    )
