"""Checks the decisions of a portal (sections 5, 6, and 8 of PROTOCOL.md)."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from bridge.approval.decision_token import MAX_TOKEN_CHARACTERS, Claims, RefusedDecision, verify
from bridge.approval.digest import digest
from bridge.approval.refusal_reasons import RefusalReason
from bridge.config.trusted_keys import TrustedKey
from bridge.events.event import ScheduledEvent
from bridge.events.record import Verdict
from bridge.testing.portal_check.report import Report
from bridge.testing.portal_check.request import Exchange
from bridge.testing.portal_check.requirements import Requirement

_LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.utc)


class DecisionChecks:
    """Checks decisions for the VM *vm_id*, and adds the results to *report*."""

    def __init__(self, report: Report, *, vm_id: str, keys: Sequence[TrustedKey]) -> None:
        self._report = report
        self._vm_id = vm_id
        self._keys = keys
        if not keys:
            self._report.untried(Requirement.FORM, "The kit has no public key. To check this, set --public-key.")

    def look(self, token: str, exchange: Exchange, *, is_new: bool = False) -> Claims | None:
        """Return the claims in *token*, or None if an agent would reject the token.

        If *is_new* is true, a decision that is signed with an unknown key is a violation. Otherwise, the check ignores
        such a decision, because the portal might also use other keys.
        """
        if len(token) > MAX_TOKEN_CHARACTERS:
            return None  # AnswerReader has reported this violation
        audience = _unverified(token).get("aud")
        if isinstance(audience, str):
            is_own = audience.lower() == self._vm_id.lower()
            detail = "The decision is for another VM. Its aud is not the vmId of the request."
            if not self._report.check(Requirement.AUDIENCE, exchange, is_met=is_own, otherwise=detail):
                return None
        if not self._keys:
            return None
        try:
            now = datetime.now(timezone.utc)
            claims = verify(token, keys=self._keys, audience=self._vm_id, now=now, created_at=_LONG_AGO)
        except RefusedDecision as error:
            is_of_others = error.reason is RefusalReason.UNKNOWN_KEY and not is_new
            if not is_of_others:
                self._report.broken(Requirement.FORM, exchange, f"An agent refuses it as {error.reason.value}: {error}")
            return None
        self._report.met(Requirement.FORM)
        return claims

    def about(self, claims: Claims, event: ScheduledEvent, exchange: Exchange) -> None:
        """Check that *claims* match *event*, which the kit sent in a record."""
        detail = f"The sub is {claims.event_id!r}, but the EventId is {event.event_id!r}."
        is_event = claims.event_id == event.event_id
        if self._report.check(Requirement.EVENT, exchange, is_met=is_event, otherwise=detail):
            wanted = digest(event)
            detail = f"The event_digest is {claims.event_digest}, but the digest of the event is {wanted}."
            is_same = claims.event_digest == wanted
            self._report.check(Requirement.DIGEST, exchange, is_met=is_same, otherwise=detail)

    def hold(self, hold: Claims, approval: Claims, exchange: Exchange) -> None:
        """Check that the decision *hold* is a hold and is newer than the decision *approval*."""
        is_hold = hold.verdict is Verdict.HOLD
        detail = f"The decision is {hold.verdict.value}, but the kit requested a hold."
        if self._report.check(Requirement.HOLD, exchange, is_met=is_hold, otherwise=detail):
            is_newer = hold.issued_at > approval.issued_at
            detail = "The iat is not later than the iat of the approval."
            self._report.check(Requirement.HOLD, exchange, is_met=is_newer, otherwise=detail)


def expires_at(token: str) -> float:
    """Return the unverified ``exp`` claim of *token*, or 0 if the claim cannot be read."""
    found = _unverified(token).get("exp")
    return float(found) if isinstance(found, int | float) else 0.0


def _unverified(token: str) -> dict[str, Any]:
    parts = token.split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, payload, signature
        return {}
    try:
        value = json.loads(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
