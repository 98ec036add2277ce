"""Checks the tokens that a portal issues for attested documents (PROTOCOL.md, section 2).

If a portal accepted a modified document, an attacker could get a token for any VM. A portal must also reject documents
that have been used before. The check results do not contain tokens.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec

from bridge.errors import BridgeError
from bridge.system.access_tokens import (
    CHALLENGE_PATH,
    MAX_ANSWER_BYTES,
    TOKEN_PATH,
    Challenge,
    DocumentRefusal,
    TokenAnswer,
    has_nonce,
    refusal_in,
)
from bridge.system.secrets import MASK
from bridge.testing.portal_check.report import Report
from bridge.testing.portal_check.request import CheckClient, Exchange
from bridge.testing.portal_check.requirements import Requirement

_OK = 200
_TOO_LARGE = "A" * (32 * 1024 + 4)
_STATUSES = {DocumentRefusal.TOO_LARGE: 413, DocumentRefusal.MALFORMED: 400}
_STALE, _OTHER = 409, 403
_BY_A_TOKEN = (Requirement.TOKEN, Requirement.TAMPERED, Requirement.REPLAYED)

_AnswerT = TypeVar("_AnswerT", bound=msgspec.Struct)


class AttestedChecks:
    """Sends requests with *asker*, and adds the results to *report*.

    *document* returns a document with a nonce.
    """

    def __init__(self, asker: CheckClient, report: Report, document: Callable[[str], str]) -> None:
        self._asker = asker
        self._report = report
        self._document = document

    def run(self) -> None:
        """Run all checks."""
        if self._challenge() is None:
            return
        self._expect_refusal(Requirement.NO_DOCUMENT, self._shown("AAAA"), "A malformed document gets a token.")
        self._expect_refusal(
            Requirement.DOCUMENT_SIZE, self._shown(_TOO_LARGE), "It returns a token for a document of 33 KiB."
        )
        try:
            self._genuine()
        except BridgeError as error:
            for requirement in _BY_A_TOKEN:
                self._report.untried(requirement, f"The metadata service returned no document: {error}")

    def _genuine(self) -> None:
        """Send a modified document and then the real document.

        A rejected document must not use up the challenge.
        """
        nonce = self._challenge()
        if nonce is None:
            return
        document = self._document(nonce)
        if not has_nonce(document, nonce):
            for requirement in _BY_A_TOKEN:
                self._report.untried(requirement, "The metadata service returned a document of an earlier request.")
            return
        detail = "A real document with one changed character gets a token."
        self._expect_refusal(Requirement.TAMPERED, self._shown(_tampered(document, self._asker.vm_id)), detail)
        exchange = self._shown(document)
        if self._read(exchange, TokenAnswer, Requirement.TOKEN) is not None:
            self._once(document)

    def _once(self, document: str) -> None:
        foreign = self._document(f"portal-check-{secrets.token_hex(8)}")
        if self._shown(foreign).status == _OK:
            why = "The portal accepts documents with other nonces, which its operator can allow."
            self._report.untried(Requirement.REPLAYED, why)
            return
        self._expect_refusal(Requirement.REPLAYED, self._shown(document), "A document gets a second token.")

    # Requests.

    def _challenge(self) -> str | None:
        """Return the nonce of a challenge, or None if the response is invalid."""
        exchange = self._asker.post_plain(CHALLENGE_PATH, b"{}")
        challenge = self._read(exchange, Challenge, Requirement.CHALLENGE)
        if challenge is None:
            return None
        again = self._read(self._asker.post_plain(CHALLENGE_PATH, b"{}"), Challenge, Requirement.CHALLENGE)
        is_new = again is None or again.nonce != challenge.nonce
        self._check(Requirement.CHALLENGE, exchange, is_met=is_new, otherwise="Two challenges have the same nonce.")
        return challenge.nonce

    def _shown(self, document: str) -> Exchange:
        return self._asker.post_plain(TOKEN_PATH, json.dumps({"document": document}).encode())

    # Responses.

    def _read(self, exchange: Exchange, kind: type[_AnswerT], requirement: Requirement) -> _AnswerT | None:
        detail = f"{exchange.result}, so an agent gets no token."
        if not self._check(requirement, exchange, is_met=exchange.status == _OK, otherwise=detail):
            return None
        is_short = len(exchange.body) <= MAX_ANSWER_BYTES
        detail = f"The response has more than {MAX_ANSWER_BYTES} bytes."
        if not self._check(requirement, exchange, is_met=is_short, otherwise=detail):
            return None
        try:
            return msgspec.json.decode(exchange.body, type=kind)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            detail = (
                f"An agent cannot read the response: {error}."
                if isinstance(error, msgspec.ValidationError)
                else "The response is not JSON."
            )
            self._check(requirement, exchange, is_met=False, otherwise=detail)
            return None

    def _expect_refusal(self, requirement: Requirement, exchange: Exchange, detail: str) -> None:
        status = exchange.status
        detail = detail if status == _OK else exchange.result
        if not self._check(requirement, exchange, is_met=status not in (None, _OK), otherwise=detail):
            return
        refusal = refusal_in(exchange.body)
        detail = "The response has no `reason` from PROTOCOL.md."
        self._check(Requirement.REFUSAL, exchange, is_met=refusal is not None, otherwise=detail)
        if refusal is not None:
            wanted = _STATUSES.get(refusal, _STALE if refusal.is_stale else _OTHER)
            detail = f"The status of `{refusal.value}` is {wanted}, but the response is {status}."
            self._check(Requirement.REFUSAL, exchange, is_met=status == wanted, otherwise=detail)

    def _check(self, requirement: Requirement, exchange: Exchange, *, is_met: bool, otherwise: str) -> bool:
        is_secret = exchange.status == _OK and requirement is not Requirement.CHALLENGE
        shown = msgspec.structs.replace(exchange, body=MASK.encode()) if is_secret else exchange
        return self._report.check(requirement, shown, is_met=is_met, otherwise=otherwise)


def _tampered(document: str, vm_id: str) -> str:
    """Return *document* with a different vmId.

    This works because the content of a document is plain text.
    """
    found = base64.b64decode(document)
    for own in (vm_id.encode(), vm_id.upper().encode()):
        if own in found:
            other = (b"1" if own[:1] == b"0" else b"0") + own[1:]
            return base64.b64encode(found.replace(own, other)).decode()
    return base64.b64encode(found[:-1] + bytes([found[-1] ^ 1])).decode()
