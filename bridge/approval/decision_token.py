"""Verifies decision tokens. Raises RefusedDecision, with a reason, if a token is invalid.

`RefusalReason` lists the reasons in the order of the checks.

1. The form: a token is a compact JWS (RFC 7515). Any other form is refused before any cryptography, so that thousands
   of forged tokens cost little. Padding, white space, and non-canonical base64url are refused, so that each decision
   has only one valid text.
2. The header: ``alg`` and ``typ`` each have only one valid value. ``kid`` must be the name of a key in the
   configuration. All other members, such as ``jku``, ``jwk``, and ``crit``, are refused, because a token must not
   select its own key.
3. The signature: PyJWT verifies the Ed25519 signature with the key.
4. The claims: the payload is parsed only after the signature is verified. Duplicate members, numbers that are not
   finite, and invalid Unicode are refused, because parsers disagree about them. Unknown claims are ignored.
5. The issuer, the VM, and the times: the issuer must own the key, and the decision must be for this VM and valid now.

This module does not detect replayed tokens (see `bridge.outbox.approvals`), and it does not compare a decision with the
current event (see `bridge.approval.evaluate`).
"""

from __future__ import annotations

import functools
import hashlib
import re
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from bridge import strict_json
from bridge.approval.refusal_reasons import RefusalReason
from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.config.trusted_keys import PublicKey, TrustedKey
from bridge.errors import BridgeError, KeyUnusable
from bridge.events.record import Verdict
from bridge.text import EXCERPT_CHARACTERS, one_line

if TYPE_CHECKING:
    from jwt import PyJWS

ALGORITHM = "EdDSA"
TOKEN_TYPE = "scheduled-events-decision+jwt"  # noqa: S105 - no secret: the ``typ`` of the header
MAX_TOKEN_CHARACTERS = 8 * 1024
MAX_HEADER_CHARACTERS = 512
MAX_LIFETIME_SECONDS = 24 * 3600
MAX_REASON_CHARACTERS = 256
MAX_EVENT_ID_CHARACTERS = 256

_MAX_DIGITS = 20
#: The end of the year 9999, the latest time that a datetime can represent.
_LAST_SECOND = 253402300799
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

# The last character of a segment may contain unused bits, which are zero in the canonical form (RFC 4648 section 3.5).
# A signature of 64 bytes has 86 characters.
_SEGMENT = r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048])?"
_THREE_PARTS = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]*)\.([A-Za-z0-9_-]*)")
_CANONICAL = re.compile(_SEGMENT)
_SIGNATURE = re.compile(r"[A-Za-z0-9_-]{85}[AQgw]")

_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_CLAIM_NAMES = {
    "issuer": "iss",
    "audience": "aud",
    "event_id": "sub",
    "decision_id": "jti",
    "issued_at": "iat",
    "expires_at": "exp",
    "not_valid_before": "nbf",
    "verdict": "decision",
}
_KNOWN_CLAIMS = frozenset({*_CLAIM_NAMES.values(), "reason", "event_digest"})


class Claims(msgspec.Struct, frozen=True, kw_only=True, rename=_CLAIM_NAMES):
    """A verified token: its claims and the key that signed it."""

    kid: str
    approver: str
    key_sha256: str
    """The digest of the public key. Two entries with the same key have the same digest."""
    payload_sha256: str
    """The digest of the signed bytes. A second token with the same ``jti`` must have the same digest."""

    issuer: _Name
    """Must be the approver to whom the key belongs."""
    audience: _Name
    event_id: Annotated[str, Meta(min_length=1, max_length=MAX_EVENT_ID_CHARACTERS)]
    decision_id: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
    issued_at: datetime
    """UTC, with microseconds. The newest decision on an event wins."""
    expires_at: datetime
    """The agent accepts the decision until this time. It can send the request to Azure later."""
    not_valid_before: datetime | None = None
    verdict: Verdict
    reason: str | None = None
    """At most 256 printable characters on one line."""
    event_digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

    def __post_init__(self) -> None:
        """Raise ValueError if a name is unprintable or ``exp`` is not later than ``iat``."""
        for name in ("issuer", "audience", "event_id"):
            if not getattr(self, name).isprintable():
                raise ValueError(f"{_CLAIM_NAMES[name]} has characters that cannot be printed")
        if self.expires_at <= self.issued_at:
            raise ValueError("exp is not after iat")


# msgspec crashes if two threads use a class for the first time at once, so use the class during the import.
msgspec.json.Decoder(Claims)


class RefusedDecision(BridgeError):
    """The agent refuses a token because of *reason*.

    If a token is refused before its signature has been verified, *approver* and *claims* are None, and the error
    message does not quote the token. If the claims are malformed, only *claims* is None.
    """

    def __init__(
        self, reason: RefusalReason, message: str, *, approver: str | None = None, claims: Claims | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.approver = approver
        self.claims = claims


class ClaimsMalformed(ValueError):
    """The payload of a token is not a JSON object, or a claim is missing or invalid."""


def verify(token: str, *, keys: Sequence[TrustedKey], audience: str, now: datetime, created_at: datetime) -> Claims:
    """Return the claims of *token*. If it is invalid, raise RefusedDecision with the reason.

    *audience* is this VM's vmId. *created_at* is when the outbox was created. The function refuses an approve decision
    from before that time, because the agent might have acted on it already, with an outbox that was then deleted.
    """
    claims = _read_signed(token, keys)
    _check_addressing(claims, audience)
    _check_when(claims, now=now, created_at=created_at)
    return claims


def verify_for_any_vm(token: str, *, keys: Sequence[TrustedKey], now: datetime) -> Claims:
    """Return the claims of *token*, whichever VM it is for. Portals use this function."""
    claims = _read_signed(token, keys)
    _check_addressing(claims, claims.audience)
    _check_when(claims, now=now, created_at=_EPOCH)
    return claims


def read_header(token: str) -> dict[str, Any]:
    """Return the unverified header of *token*. Raise RefusedDecision for an invalid form."""
    if type(token) is not str or len(token) > MAX_TOKEN_CHARACTERS:
        raise _unread(RefusalReason.MALFORMED, f"is not a text of at most {MAX_TOKEN_CHARACTERS} characters")
    parts = _THREE_PARTS.fullmatch(token)
    if parts is None or len(parts[1]) > MAX_HEADER_CHARACTERS or not _CANONICAL.fullmatch(parts[1]):
        raise _unread(RefusalReason.MALFORMED, "is not a compact JWS with three parts in canonical base64url")
    header = _header_or_none(parts[1])
    if header is None:
        raise _unread(RefusalReason.MALFORMED, "has a header that is not a JSON object without duplicate members")
    if header.get("alg") != ALGORITHM:
        raise _unread(RefusalReason.BAD_ALGORITHM, f"is not signed with {ALGORITHM}, the only valid algorithm")
    if header.get("typ") != TOKEN_TYPE:
        raise _unread(RefusalReason.BAD_TYPE, f"is not of the type {TOKEN_TYPE}")
    if not header.keys() <= {"alg", "typ", "kid"}:
        raise _unread(RefusalReason.BAD_HEADER, "has other members than alg, typ, and kid in its header")
    if not parts[2] or not _CANONICAL.fullmatch(parts[2]):
        raise _unread(RefusalReason.MALFORMED, "has no payload in canonical base64url")
    if not _SIGNATURE.fullmatch(parts[3]):
        raise _unread(RefusalReason.MALFORMED, "has no Ed25519 signature of 64 bytes in canonical base64url")
    return header


def read_claims(payload: bytes, *, kid: str, approver: str, key_sha256: str) -> Claims:
    """Return the claims in *payload*, which the key *kid* has signed. Raises ClaimsMalformed."""
    members = {name: value for name, value in _strict_object(payload).items() if name in _KNOWN_CLAIMS}
    if isinstance(members.get("reason"), str):  # on one line, so that a line break does not invalidate a hold
        members["reason"] = one_line(members["reason"], MAX_REASON_CHARACTERS)
    for name in ("iat", "exp", "nbf"):
        members[name] = _date(name, members.get(name))
    # These values come last, so that no member of the payload can replace them.
    members |= {"kid": kid, "approver": approver, "key_sha256": key_sha256}
    members["payload_sha256"] = hashlib.sha256(payload).hexdigest()
    try:
        return msgspec.convert(members, Claims)
    except msgspec.ValidationError as error:
        raise ClaimsMalformed(one_line(str(error), EXCERPT_CHARACTERS)) from None


def _read_signed(token: str, keys: Sequence[TrustedKey]) -> Claims:
    key = _pinned_key(read_header(token), keys)
    try:
        public_key = key.load()
    except KeyUnusable as error:
        raise RefusedDecision(RefusalReason.KEY_UNUSABLE, str(error)) from error
    payload = _signed_payload(token, key, public_key)
    try:
        return read_claims(payload, kid=key.kid, approver=key.approver, key_sha256=public_key.sha256)
    except ClaimsMalformed as error:
        raise RefusedDecision(
            RefusalReason.MALFORMED_CLAIMS,
            f"A decision signed by {key.approver} cannot be read: {error}. PROTOCOL.md lists the claims.",
            approver=key.approver,
        ) from error


@functools.lru_cache(maxsize=16)  # all tokens of a key have the same header
def _header_or_none(segment: str) -> dict[str, Any] | None:
    # If the refusal were raised here, its context would be the parser's error, which contains the text.
    try:
        return _strict_object(_decoded(segment))
    except ValueError:
        return None


def _pinned_key(header: dict[str, Any], keys: Sequence[TrustedKey]) -> TrustedKey:
    kid = header.get("kid")
    found = [key for key in keys if key.kid == kid]
    if not found:
        raise _unread(RefusalReason.UNKNOWN_KEY, "names no key of approval.remote.keys")
    if len(found) > 1:
        raise RefusedDecision(
            RefusalReason.KEY_UNUSABLE, f"Two keys are called '{found[0].kid}'. Give each key a unique name."
        )
    return found[0]


@functools.lru_cache(maxsize=1)
def jws() -> PyJWS:
    """Return the object that signs and verifies tokens. It accepts only one algorithm."""
    from jwt import PyJWS  # noqa: PLC0415 - imports cryptography, which only approvals need

    return PyJWS(algorithms=[ALGORITHM])


def _signed_payload(token: str, key: TrustedKey, public_key: PublicKey) -> bytes:
    signed, _, signature = token.rpartition(".")
    if jws().get_algorithm_by_name(ALGORITHM).verify(signed.encode("ascii"), public_key.key, _decoded(signature)):
        return _decoded(signed.partition(".")[2])
    raise RefusedDecision(
        RefusalReason.FORGED, f"A decision has an invalid signature for the key '{key.kid}' ({key.public_key_file})."
    )


def _decoded(segment: str) -> bytes:
    return urlsafe_b64decode(segment + "=" * (-len(segment) % 4))


def _unread(reason: RefusalReason, what: str) -> RefusedDecision:
    return RefusedDecision(reason, f"A decision {what}.")


def _check_addressing(claims: Claims, audience: str) -> None:
    if claims.issuer != claims.approver:
        raise _refused(
            RefusalReason.WRONG_ISSUER,
            claims,
            f"has the iss '{claims.issuer}', but its key belongs to {claims.approver}",
        )
    # Check for ASCII first, because lower() turns the Kelvin sign into an ordinary k.
    if not (claims.audience.isascii() and audience and claims.audience.lower() == audience.lower()):
        raise _refused(RefusalReason.WRONG_AUDIENCE, claims, f"is for '{claims.audience}', not for this VM")


def _check_when(claims: Claims, *, now: datetime, created_at: datetime) -> None:
    if claims.verdict is Verdict.HOLD:
        return  # an early or late hold does no harm, but losing a hold because of a wrong clock would
    skew = timedelta(seconds=CLOCK_SKEW_SECONDS)
    starts = max(claims.issued_at, claims.not_valid_before or claims.issued_at)
    if claims.expires_at - claims.issued_at > timedelta(seconds=MAX_LIFETIME_SECONDS):
        raise _refused(RefusalReason.LIFETIME_TOO_LONG, claims, f"is valid for over {MAX_LIFETIME_SECONDS} s")
    if claims.issued_at < created_at:  # allow no clock skew, because the outbox lacks earlier decisions
        raise _refused(
            RefusalReason.ISSUED_BEFORE_THIS_OUTBOX,
            claims,
            f"was issued at {claims.issued_at.isoformat()}, before the outbox was created at {created_at.isoformat()}",
        )
    if starts - skew > now:
        why = f"is not valid before {starts.isoformat()}. The agent checks the decision again then"
        raise _refused(RefusalReason.NOT_YET_VALID, claims, why)
    if now >= claims.expires_at + skew:
        raise _refused(RefusalReason.EXPIRED, claims, f"expired at {claims.expires_at.isoformat()}")


def _refused(reason: RefusalReason, claims: Claims, what: str) -> RefusedDecision:
    return RefusedDecision(
        reason,
        f"The decision {claims.decision_id} signed by {claims.approver} {what}.",
        approver=claims.approver,
        claims=claims,
    )


def _date(name: str, value: Any) -> datetime | None:
    """Return the time of a NumericDate (RFC 7519 section 2), in seconds since 1970."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LAST_SECOND:
        raise ClaimsMalformed(f"{name} is not a number of seconds since 1970")
    return _EPOCH + timedelta(seconds=value)


def _strict_object(text: bytes) -> dict[str, Any]:
    try:
        value = strict_json.loads(text.decode("utf-8"), most_digits=_MAX_DIGITS)
    except strict_json.JsonRefused as error:
        raise ClaimsMalformed(str(error)) from None
    except ValueError:
        raise ClaimsMalformed("it is not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise ClaimsMalformed("it is not a JSON object")
    return value
