"""The inbox of decisions: the portal's tokens are verified and their decisions kept; the others become refusals.

A token is verified and its decision kept before anything else is done with it, on the thread that brought it: a
stranger's forgeries delay no other part, and a crash a moment later loses nothing. While this VM's id is unknown or
the outbox lives in memory, tokens wait here, as many as two answers of the portal may hold: after a restart the portal
gives all of them again. So do tokens whose key file cannot be used: somebody may be writing it just now, and what is
wrong on this VM consumes no decision. And so do those that came before their time (``nbf``, or a clock that is behind):
the portal does not give them again. Of the last two kinds 2,000 wait; of more, those before their time go first, since
they are no holds, and always those of the key that has the most.

A stranger can send ten thousand forgeries, and must not be able to push real records out of the outbox or to page
people ten thousand times. So refusals make at most one record a minute and reason, with a count (`RefusalLimiter`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from bridge.approval.evaluation_step import Trust
from bridge.approval.outcomes import Refusal
from bridge.approval.token import MAX_LIFETIME_SECONDS, Claims, read_header, verify
from bridge.clock import REAL_CLOCK, Clock
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import KeyMissing, KeyUnusable, OutboxError, OutboxReadOnly, RefusalReason, RefusedDecision
from bridge.events.event import VmIdentity
from bridge.events.record import Approval, Transition, Verdict
from bridge.logs import ThrottledLog
from bridge.outbox import approvals
from bridge.outbox.approvals import ApprovalRecord, KeepResult, StoredDecision
from bridge.outbox.decision_limits import MOST_OPEN_DECISIONS, GivenUp
from bridge.outbox.outbox import Outbox

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
_MOST_WAITING = 2_000
_RETRY_SECONDS = 1.0
_NOT_KEPT = {
    KeepResult.REPLAYED: (RefusalReason.REPLAYED, "Its jti was used before for something else."),
    KeepResult.TOO_OLD: (
        RefusalReason.ISSUED_BEFORE_THIS_OUTBOX,
        "It was issued before the outbox was made.",
    ),
    KeepResult.SURPLUS: (
        RefusalReason.SUPERSEDED,
        f"Its key signed {MOST_OPEN_DECISIONS} newer decisions on this event, and no more of them count.",
    ),
    KeepResult.NO_ROOM: (
        RefusalReason.NO_ROOM,
        "Decisions on events that this VM does not have may not fill its outbox.",
    ),
}


class _Later(msgspec.Struct, frozen=True, kw_only=True):
    """What a token waits for: the time from which it may count, or else that the key *kid* can be used."""

    kid: str
    counts_from: datetime | None


class DecisionInbox:
    """Verifies tokens with *keys* and keeps their decisions; *vm* returns who this VM is."""

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
        self._later: dict[str, _Later] = {}

    def receive(self, tokens: Sequence[str]) -> list[Refusal]:
        """Keep the decisions in *tokens*, or let them wait; return the refusals.

        Raises nothing that one token can cause; OutboxError when too many wait, and the portal must give these again.
        """
        refusals = self._keep_if_possible(tokens)
        if refusals is not None:
            return refusals
        with self._lock:
            waiting = {**self._waiting, **dict.fromkeys(tokens)}
            if len(waiting) > _MOST_WAITING:
                raise OutboxError(f"More than {_MOST_WAITING:,} decisions wait until they can be kept.")
            self._waiting = waiting
        return []

    @property
    def has_waiting(self) -> bool:
        """Return whether tokens wait."""
        return bool(self._waiting or self._later)

    def wait_seconds(self) -> float:
        """Return the seconds until tokens that wait are to be tried again; infinity when none wait."""
        with self._lock:
            times = [each.counts_from for each in self._later.values() if each.counts_from is not None]
            if self._waiting or len(times) < len(self._later):
                return _RETRY_SECONDS
        return max((min(times) - self._clock.now()).total_seconds(), _RETRY_SECONDS) if times else math.inf

    @property
    def has_unkept(self) -> bool:
        """Return whether tokens wait that were not looked at yet."""
        return bool(self._waiting)

    @property
    def awaits_key(self) -> bool:
        """Return whether a token waits for a key file that is there and cannot be used, maybe while it is written."""
        with self._lock:
            kids = {each.kid for each in self._later.values() if each.counts_from is None}
        return any(key.kid in kids and _is_broken(key) for key in self._keys)

    def receive_waiting(self) -> list[Refusal]:
        """Try again the tokens that wait; those that were not looked at go on waiting when that fails."""
        with self._lock:
            waiting = list(self._waiting)
            kids = {key.kid for key in self._keys if self._later and _is_usable(key)}
            now = self._clock.now()
            later = [
                token
                for token, until in self._later.items()
                if (until.kid in kids if until.counts_from is None else until.counts_from <= now)
            ]
        refusals = self._keep_if_possible(waiting + later) if waiting or later else None
        if refusals is None:
            return []
        with self._lock:
            for token in waiting:
                self._waiting.pop(token, None)
        return refusals

    def trust(self, decision: StoredDecision) -> Trust:
        """Return whether the key behind a kept decision still counts; a local decision has none."""
        if decision.source == "cli":
            return Trust.KEPT
        for key in self._keys:
            if key.kid == decision.kid and key.approver == decision.approver:
                try:
                    return Trust.KEPT if key.load().sha256 == decision.key_sha256 else Trust.REVOKED
                except KeyMissing:
                    return Trust.REVOKED
                except KeyUnusable as error:
                    self._log.problem(key.kid, logging.ERROR, f"{error} What it signed waits.")
                    return Trust.UNKNOWN
        return Trust.REVOKED

    def _keep_if_possible(self, tokens: Sequence[str]) -> list[Refusal] | None:
        """Keep the decisions in *tokens* and return the refusals; None while nothing can be kept."""
        vm_id = self._vm().vm_id
        if not vm_id or self._outbox.in_memory:
            return None
        try:
            return self._keep(tokens, vm_id)
        except OutboxReadOnly:
            return None

    def _keep(self, tokens: Sequence[str], vm_id: str) -> list[Refusal]:
        created_at = self._outbox.created_at
        decisions: dict[str, StoredDecision] = {}
        refusals: list[Refusal] = []
        for token in tokens:
            try:
                claims = verify(token, keys=self._keys, audience=vm_id, now=self._clock.now(), created_at=created_at)
                decisions[token] = self._stored(claims)
            except RefusedDecision as refused:
                if not (self._waits_already(token, refused) or self._is_known(refused)):
                    refusals.append(_refusal(refused))
        if decisions:
            kept = list(decisions.values())
            keep = self._outbox.records.keep_decisions
            results, given_up = self._outbox.write(keep, kept, list(decisions)).result()
            refusals += [
                _not_kept(decision, *_NOT_KEPT[result])
                for decision, result in zip(kept, results, strict=True)
                if result in _NOT_KEPT
            ]
            refusals += [_not_kept(each, *_NOT_KEPT[each.why]) for each in given_up]
        with self._lock:
            for token in decisions:
                self._later.pop(token, None)
            self._limit_later()
        return refusals

    def _waits_already(self, token: str, refused: RefusedDecision) -> bool:
        """Let *token* wait if its key file or its time may come yet; return whether it waited for that before."""
        until = None
        if refused.reason is RefusalReason.KEY_UNUSABLE or refused.counts_from is not None:
            until = _Later(kid=str(read_header(token).get("kid")), counts_from=refused.counts_from)
        with self._lock:
            before = self._later.pop(token, None)
            if until is not None:
                self._later[token] = until
        return until is not None and before == until

    def _limit_later(self) -> None:
        """Drop what is too much: what came before its time first, and of the key of which the most waits."""
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
        """Return whether the decision was kept when it came; that it would not count any more is no refusal."""
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

    def _stored(self, claims: Claims) -> StoredDecision:
        return StoredDecision(
            source="portal",
            approver=claims.approver,
            kid=claims.kid,
            key_sha256=claims.key_sha256,
            decision_id=claims.decision_id,
            payload_sha256=claims.payload_sha256,
            event_id=claims.event_id,
            event_digest=claims.event_digest,
            verdict=claims.verdict,
            issued_at=round(claims.issued_at.timestamp() * 1_000_000),
            expires_at=self._kept_until(claims),
            reason=claims.reason,
            received_at=self._clock.timestamp(),
        )

    def _kept_until(self, claims: Claims) -> float:
        """Return ``exp``; of a hold no less than a day from now, since it may come late, and no more than a day ahead.

        It is kept longer while its event is there.
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


def _not_kept(decision: StoredDecision | GivenUp, reason: RefusalReason, why: str) -> Refusal:
    return Refusal(
        reason=reason,
        message=f"The decision {decision.decision_id} signed by {decision.approver} does not count. {why}",
        source="portal",
        decision_id=decision.decision_id,
        approvers=(decision.approver,),
        event_id=decision.event_id,
    )


class _Refusals(msgspec.Struct, kw_only=True):
    """The refusals of one reason that no record tells yet."""

    first: Refusal | None = None
    count: int = 0
    quiet_until: float = -math.inf


class RefusalLimiter:
    """Counts refusals by reason, and gives out their records; safe to use from many threads.

    The first of a reason makes a record at once. Those that follow within the minute are counted, and told together
    when it is over.
    """

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_reason: dict[RefusalReason, _Refusals] = {}

    def add(self, refusal: Refusal) -> None:
        """Count one refusal."""
        with self._lock:
            refusals = self._by_reason.setdefault(refusal.reason, _Refusals())
            refusals.first = refusals.first or refusal
            refusals.count += 1

    def take(self) -> list[ApprovalRecord]:
        """Return the records that may be written now."""
        now = self._clock.monotonic()
        records = []
        with self._lock:
            for refusals in self._by_reason.values():
                if refusals.first is not None and refusals.quiet_until <= now:
                    records.append(_record(refusals.first, refusals.count))
                    refusals.first, refusals.count, refusals.quiet_until = None, 0, now + QUIET_SECONDS
        return records

    def wait_seconds(self) -> float:
        """Return the seconds until `take` has something; infinity when nothing waits."""
        with self._lock:
            waiting = [each.quiet_until for each in self._by_reason.values() if each.count]
        return max(min(waiting, default=math.inf) - self._clock.monotonic(), 0.0)


def _record(refusal: Refusal, count: int) -> ApprovalRecord:
    message = refusal.message
    if count > 1:
        message = f"{message} ({count} decisions were refused for this reason; this is the first of them.)"
    return ApprovalRecord(
        transition=Transition.APPROVAL_REFUSED,
        event=refusal.event,
        approval=Approval(
            source=refusal.source,
            decision_id=refusal.decision_id,
            approvers=refusal.approvers,
            reason=message,
            result=refusal.reason.value,
        ),
        arrivals=refusal.arrivals,
    )
