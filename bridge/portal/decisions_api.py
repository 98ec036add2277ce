"""``POST /api/v1/decisions``: forwards decisions that were signed outside the portal.

The portal verifies each decision with the public keys in its settings. If every agent would refuse the decision, the
portal rejects it so that the sender sees the error immediately. Each agent verifies the decision again with the keys on
its VM.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from bridge.approval.decision_token import Claims, RefusedDecision, verify_for_any_vm
from bridge.clock import format_time
from bridge.config.trusted_keys import TrustedKey
from bridge.logs import ThrottledLog
from bridge.portal.fleet import key_of_event_id
from bridge.portal.pending_decisions import MAX_DECISIONS
from bridge.portal.requests import error_answer, json_answer, json_of
from bridge.portal.site import Site
from bridge.portal.store.decisions import NewDecision, add_decisions


class _Submitted(msgspec.Struct, frozen=True):
    decisions: Annotated[list[str], Meta(min_length=1, max_length=MAX_DECISIONS)]


async def post(site: Site, keys: Sequence[TrustedKey], log: ThrottledLog, request: Request) -> Response:
    """Return the index of each accepted decision, and the reason for each refusal.

    The status is 400 if all decisions are refused.
    """
    if not keys:
        return error_answer(403, "This portal has no [[keys]].")
    verified: list[NewDecision | RefusedDecision] = []
    for token in (await json_of(request, _Submitted)).decisions:
        try:
            verified.append(_new(token, verify_for_any_vm(token, keys=keys, now=site.clock.now())))
        except RefusedDecision as refused:
            verified.append(refused)
            reason = refused.reason.value
            site.metrics.decisions_refused.labels(reason).inc()
            log.problem(refused.reason, logging.WARNING, f"A decision was refused: {refused}", reason=reason)
        await asyncio.sleep(0)  # a large request must not delay polls
    good = [each for each in verified if isinstance(each, NewDecision)]
    numbers = await site.store.write(add_decisions, good, at=site.now()) if good else {}
    await site.pending_decisions.catch_up()
    results = [_result(each, numbers) for each in verified]
    return json_answer({"decisions": results}, status=200 if good else 400)


def _new(token: str, claims: Claims) -> NewDecision:
    return NewDecision(
        vm_key=claims.audience.lower(),
        event_key=key_of_event_id(claims.event_id),
        jti=claims.decision_id,
        iss=claims.approver,
        decision=claims.verdict.value,
        jws=token,
        issued_at_seconds=claims.issued_at.timestamp(),
        expires_at_seconds=math.ceil(claims.expires_at.timestamp()),
        details={
            "event_id": claims.event_id,
            "event_digest": claims.event_digest,
            "kid": claims.kid,
            "reason": claims.reason,
            "issued_at": format_time(claims.issued_at),
            "expires_at": format_time(claims.expires_at),
        },
    )


def _result(each: NewDecision | RefusedDecision, numbers: dict[str, int]) -> dict[str, object]:
    if isinstance(each, RefusedDecision):
        return {"refused": each.reason.value, "message": str(each)}
    return {"index": numbers[each.jws_sha256], "vm_id": each.vm_key, "jws_sha256": each.jws_sha256}
