"""The reasons why the agent refuses a token or a decision, in the order of the checks.

PROTOCOL.md, section 10, describes each reason and the action for the portal. Three modules refuse a decision:

- `decision_token` checks the form, the key, the signature, and the claims of the token.
- `inbox` refuses a token whose ``jti`` was used before for another decision.
- `evaluate` compares the decision with the event and with other decisions.
"""

from __future__ import annotations

from enum import Enum


class RefusalReason(str, Enum):
    """The reason for a refusal. Records, metrics, and alert rules contain the values, so never rename a value.

    The checks of the first group run before the signature is verified. If one of these checks fails, the agent stores
    no part of the token, because the sender is unknown. The other checks run after the signature is verified.
    """

    MALFORMED = "malformed"
    BAD_ALGORITHM = "bad_algorithm"
    BAD_TYPE = "bad_type"
    BAD_HEADER = "bad_header"
    UNKNOWN_KEY = "unknown_key"
    """The agent does not trust the key. Accepted decisions get this reason when their key is removed or replaced."""
    KEY_UNUSABLE = "key_unusable"
    """The key file on this VM is missing or broken. The token waits, and the agent checks it again."""
    FORGED = "forged"
    """The key did not sign this token."""

    MALFORMED_CLAIMS = "malformed_claims"
    WRONG_ISSUER = "wrong_issuer"
    WRONG_AUDIENCE = "wrong_audience"
    """The decision is for another VM."""
    LIFETIME_TOO_LONG = "lifetime_too_long"
    ISSUED_BEFORE_THIS_OUTBOX = "issued_before_this_outbox"
    """The decision may be a replay, because the agent has no record of decisions before this outbox."""
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"

    REPLAYED = "replayed"
    """The ``jti`` was used for another decision."""
    EVENT_UNKNOWN = "event_unknown"
    EVENT_NOT_SCHEDULED = "event_not_scheduled"
    EVENT_CHANGED = "event_changed"
    """The digest of the event differs from the signed digest."""
    SUPERSEDED = "superseded"
    """A newer decision or a hold wins, or the key has too many open decisions."""
    TOO_FEW_APPROVERS = "too_few_approvers"


EXPLAINED = {
    RefusalReason.UNKNOWN_KEY: "The key that signed the decision is no longer trusted.",
    RefusalReason.EXPIRED: "The decision expired before it could be checked. Decide again.",
    RefusalReason.EVENT_UNKNOWN: "The document of this VM does not contain the event. The event may have ended.",
    RefusalReason.EVENT_CHANGED: "The event changed after the decision. Decide again on its newest record.",
    RefusalReason.EVENT_NOT_SCHEDULED: "The event is no longer Scheduled, so it cannot be approved.",
    RefusalReason.SUPERSEDED: "A newer decision on this event wins.",
    RefusalReason.TOO_FEW_APPROVERS: "Too few approvers decided before this decision expired.",
}
