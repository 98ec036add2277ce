"""Lists the reasons for refusing a token or a decision, in the order of the checks.

PROTOCOL.md, section 10, explains how a portal should react to each reason. Three modules refuse decisions:

- `decision_token` checks the form, the key, the signature, and the claims of the token.
- `inbox` refuses a token whose ``jti`` has already been used for another decision.
- `evaluate` compares the decision with the event and with other decisions.
"""

from __future__ import annotations

from enum import Enum

from bridge.events.event import NO_EFFECT


class RefusalReason(str, Enum):
    """The reason for a refusal. Never rename a value: records, metrics, and alerts use it.

    The first group of checks runs before the signature is verified. If one of these checks fails, the sender is
    unknown, so the agent does not store any part of the token.
    """

    MALFORMED = "malformed"  # The token is not a compact JWS of the required form.
    BAD_ALGORITHM = "bad_algorithm"  # ``alg`` is not ``EdDSA``.
    BAD_TYPE = "bad_type"  # ``typ`` is not ``scheduled-events-decision+jwt``.
    BAD_HEADER = "bad_header"  # The header has members other than ``alg``, ``typ``, and ``kid``.
    UNKNOWN_KEY = "unknown_key"  # The agent does not trust the key.
    KEY_UNUSABLE = "key_unusable"  # The key file is missing or broken. The token waits for a valid key file.
    FORGED = "forged"  # The key did not sign this token.

    MALFORMED_CLAIMS = "malformed_claims"  # The payload is not a JSON object, or a claim is missing or invalid.
    WRONG_ISSUER = "wrong_issuer"  # ``iss`` is not the approver to whom the key belongs.
    WRONG_AUDIENCE = "wrong_audience"  # The decision is for another VM.
    LIFETIME_TOO_LONG = "lifetime_too_long"  # ``exp`` is more than 24 hours after ``iat``.
    ISSUED_BEFORE_THIS_OUTBOX = "issued_before_this_outbox"  # The decision is older than the agent's outbox.
    NOT_YET_VALID = "not_yet_valid"  # ``iat`` or ``nbf`` is in the future. The agent checks the decision again later.
    EXPIRED = "expired"  # ``exp`` has passed.

    REPLAYED = "replayed"  # The ``jti`` has already been used for another decision.
    EVENT_UNKNOWN = "event_unknown"  # The VM's document contains this EventId not at all, or twice.
    EVENT_ADVISORY = "event_advisory"  # The event is only a recommendation.
    EVENT_NOT_SCHEDULED = "event_not_scheduled"  # The event has started, or has another status that cannot be approved.
    EVENT_CHANGED = "event_changed"  # The digest of the event differs from the signed digest.
    SUPERSEDED = "superseded"  # A newer decision or a hold overrides it, or the key has too many open decisions.
    TOO_FEW_APPROVERS = "too_few_approvers"  # The decision expired before enough people had approved the event.


EXPLAINED = {
    RefusalReason.UNKNOWN_KEY: "The key that signed the decision is no longer trusted.",
    RefusalReason.EXPIRED: "The decision expired before it could be checked. Decide again.",
    RefusalReason.EVENT_UNKNOWN: "The document of this VM does not contain the event. The event may have ended.",
    RefusalReason.EVENT_CHANGED: "The event changed after the decision. Decide again on its newest record.",
    RefusalReason.EVENT_NOT_SCHEDULED: "The event is no longer Scheduled, so it cannot be approved.",
    RefusalReason.EVENT_ADVISORY: NO_EFFECT,
    RefusalReason.SUPERSEDED: "A newer decision on this event wins.",
    RefusalReason.TOO_FEW_APPROVERS: "Too few approvers decided before this decision expired.",
}
