"""Why a decision was not followed: one flat list of stable words.

They stand in records, metrics and alert rules, so a word is never renamed. The first group is found before a signature
verified; until then a token is a stranger's text, and nothing it says is kept. From the second group on the signature
is the approver's, and what the token claims may be recorded.
"""

from __future__ import annotations

from enum import Enum

from bridge.approval.claims import Claims
from bridge.errors import BridgeError


class RefusalReason(str, Enum):
    """Why a decision was not followed."""

    MALFORMED = "malformed"
    BAD_ALGORITHM = "bad_algorithm"
    BAD_TYPE = "bad_type"
    BAD_HEADER = "bad_header"
    UNKNOWN_KEY = "unknown_key"
    KEY_UNUSABLE = "key_unusable"
    FORGED = "forged"

    MALFORMED_CLAIMS = "malformed_claims"
    WRONG_ISSUER = "wrong_issuer"
    WRONG_AUDIENCE = "wrong_audience"
    LIFETIME_TOO_LONG = "lifetime_too_long"
    ISSUED_BEFORE_THIS_OUTBOX = "issued_before_this_outbox"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"

    REPLAYED = "replayed"
    EVENT_UNKNOWN = "event_unknown"
    EVENT_NOT_SCHEDULED = "event_not_scheduled"
    EVENT_CHANGED = "event_changed"
    SUPERSEDED = "superseded"
    TOO_FEW_APPROVERS = "too_few_approvers"

    @property
    def is_verified(self) -> bool:
        """Return whether the signature had verified when this was found."""
        return self not in _BEFORE_THE_SIGNATURE


_BEFORE_THE_SIGNATURE = frozenset(
    {
        RefusalReason.MALFORMED,
        RefusalReason.BAD_ALGORITHM,
        RefusalReason.BAD_TYPE,
        RefusalReason.BAD_HEADER,
        RefusalReason.UNKNOWN_KEY,
        RefusalReason.KEY_UNUSABLE,
        RefusalReason.FORGED,
    }
)


class DecisionRefused(BridgeError):
    """A decision does not count, for *reason*.

    *approver* is who signed it, null unless the signature verified. *claims* are null also when the signed text
    could not be read. The message of a reason that is not verified holds nothing that the token said.
    """

    def __init__(
        self, reason: RefusalReason, message: str, *, approver: str | None = None, claims: Claims | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.approver = approver
        self.claims = claims
