"""One token in, a decision that may be followed or the reason why not: written as if it will be attacked.

A token is a compact JWS (RFC 7515) of one exact form, and anything else is refused before any arithmetic: ten thousand
forgeries must cost little. The header chooses nothing. ``alg`` and ``typ`` must be the one word each; ``kid`` picks
one of the keys that a person put on this VM, by comparison and never as a path; every other member (``crit``, ``jku``,
``jwk``, ``x5u``, ``b64``) is refused. One decision has one text: base64url that is not canonical, padding and white
space are refused, so that a token cannot be made to look like another.

Only then is the signature checked (PyJWT, EdDSA wired in, the key's type checked when it was read), and only after it
verified is the payload looked at. The first reason found is the one that is said, in the order of `RefusalReason`.

Whether the event is still what was decided on, and whether the decision was seen before, is for others to say.
"""

from __future__ import annotations

import functools
import re
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.approval.claims import Claims, ClaimsMalformed, Decision, Verdict, read_claims, strict_object
from bridge.approval.refusal import DecisionRefused, RefusalReason
from bridge.config.trusted_keys import PublicKey, TrustedKey
from bridge.errors import KeyUnusable

if TYPE_CHECKING:
    from jwt import PyJWS

__all__ = [
    "ALGORITHM",
    "CLOCK_SKEW_SECONDS",
    "MAX_LIFETIME_SECONDS",
    "MAX_TOKEN_CHARACTERS",
    "TOKEN_TYPE",
    "Claims",
    "Decision",
    "DecisionRefused",
    "RefusalReason",
    "TrustedKey",
    "Verdict",
    "read_header",
    "verify",
]

ALGORITHM = "EdDSA"
TOKEN_TYPE = "scheduled-events-decision+jwt"  # noqa: S105 - no secret: the ``typ`` of the header
MAX_TOKEN_CHARACTERS = 8 * 1024
MAX_HEADER_CHARACTERS = 512
MAX_LIFETIME_SECONDS = 24 * 3600
#: How far the clocks of portal and VM may differ.
CLOCK_SKEW_SECONDS = 60

# The last character of a segment that is no multiple of four holds bits that no byte uses; canonical is where they are
# zero (RFC 4648 section 3.5). 64 bytes of signature are 86 characters.
_SEGMENT = r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048])?"
_THREE_PARTS = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]*)\.([A-Za-z0-9_-]*)")
_CANONICAL = re.compile(_SEGMENT)
_SIGNATURE = re.compile(r"[A-Za-z0-9_-]{85}[AQgw]")


def verify(token: str, *, keys: Sequence[TrustedKey], audience: str, now: datetime, created_at: datetime) -> Decision:
    """Return the decision in *token*; raise DecisionRefused with the first reason that it does not count.

    *audience* is this VM's vmId, *created_at* when this outbox's database was made, *now* the wall clock; both aware.
    """
    key = _pinned_key(read_header(token), keys)
    try:
        public_key = key.load()
    except KeyUnusable as error:
        raise DecisionRefused(RefusalReason.KEY_UNUSABLE, str(error)) from error
    payload = _signed_payload(token, key, public_key)
    try:
        claims = read_claims(payload, kid=key.kid, approver=key.approver, key_sha256=public_key.sha256)
    except ClaimsMalformed as error:
        raise DecisionRefused(
            RefusalReason.MALFORMED_CLAIMS,
            f"A decision signed by {key.approver} cannot be read: {error}. PROTOCOL.md lists the claims.",
            approver=key.approver,
        ) from error
    _check_addressing(claims, audience)
    _check_times(claims, now=now, created_at=created_at)
    return Decision(**msgspec.structs.asdict(claims))


def read_header(token: str) -> dict[str, Any]:
    """Return the header of a token that has the one form a decision may have; nothing of it is verified.

    Raises DecisionRefused for any other form, before any arithmetic.
    """
    if type(token) is not str or len(token) > MAX_TOKEN_CHARACTERS:
        raise _unread(RefusalReason.MALFORMED, f"is no text of at most {MAX_TOKEN_CHARACTERS} characters")
    parts = _THREE_PARTS.fullmatch(token)
    if parts is None or len(parts[1]) > MAX_HEADER_CHARACTERS or not _CANONICAL.fullmatch(parts[1]):
        raise _unread(RefusalReason.MALFORMED, "is no compact JWS: three parts of canonical base64url, nothing else")
    header = _header_or_nothing(parts[1])
    if header is None:
        raise _unread(RefusalReason.MALFORMED, "has a header that is no JSON object with each member once")
    if header.get("alg") != ALGORITHM:
        raise _unread(RefusalReason.BAD_ALGORITHM, f"is not signed with {ALGORITHM}, the only algorithm there is")
    if header.get("typ") != TOKEN_TYPE:
        raise _unread(RefusalReason.BAD_TYPE, f"is not of the type {TOKEN_TYPE}")
    if not header.keys() <= {"alg", "typ", "kid"}:
        raise _unread(RefusalReason.BAD_HEADER, "has more in its header than alg, typ and kid")
    if not parts[2] or not _CANONICAL.fullmatch(parts[2]):
        raise _unread(RefusalReason.MALFORMED, "has no payload in canonical base64url")
    if not _SIGNATURE.fullmatch(parts[3]):
        raise _unread(RefusalReason.MALFORMED, "has no Ed25519 signature of 64 bytes in canonical base64url")
    return header


def _header_or_nothing(segment: str) -> dict[str, Any] | None:
    # Raised from in here, a refusal would carry the parser's error as its context, and that carries the text.
    try:
        return strict_object(urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    except ValueError:
        return None


def _pinned_key(header: dict[str, Any], keys: Sequence[TrustedKey]) -> TrustedKey:
    kid = header.get("kid")
    found = [key for key in keys if key.kid == kid]
    if not found:
        raise _unread(RefusalReason.UNKNOWN_KEY, "names no key that this VM trusts; approval.remote.keys lists them")
    if len(found) > 1:
        raise DecisionRefused(
            RefusalReason.KEY_UNUSABLE, f"Two keys are called '{found[0].kid}'. Give every key a name of its own."
        )
    return found[0]


@functools.lru_cache(maxsize=1)
def _jws() -> PyJWS:
    from jwt import PyJWS  # noqa: PLC0415 - brings cryptography; imported where approvals are used, and only there

    return PyJWS(algorithms=[ALGORITHM])


def _signed_payload(token: str, key: TrustedKey, public_key: PublicKey) -> bytes:
    from jwt import PyJWTError  # noqa: PLC0415

    try:
        return bytes(_jws().decode(token, public_key.key, algorithms=[ALGORITHM]))
    except PyJWTError:
        pass
    raise DecisionRefused(
        RefusalReason.FORGED, f"A decision has a signature that is not of kid '{key.kid}' ({key.public_key_file})."
    )


def _unread(reason: RefusalReason, what: str) -> DecisionRefused:
    return DecisionRefused(reason, f"A decision {what}.")


def _check_addressing(claims: Claims, audience: str) -> None:
    if claims.issuer != claims.approver:
        raise _refused(
            RefusalReason.WRONG_ISSUER, claims, f"says iss '{claims.issuer}'; its key is {claims.approver}'s"
        )
    # ASCII first: lower() makes an ordinary k of the Kelvin sign.
    if not (claims.audience.isascii() and audience and claims.audience.lower() == audience.lower()):
        raise _refused(RefusalReason.WRONG_AUDIENCE, claims, f"is for '{claims.audience}', not for this VM")


def _check_times(claims: Claims, *, now: datetime, created_at: datetime) -> None:
    skew = timedelta(seconds=CLOCK_SKEW_SECONDS)
    starts = max(claims.issued_at, claims.not_valid_before or claims.issued_at)
    if claims.expires_at - claims.issued_at > timedelta(seconds=MAX_LIFETIME_SECONDS):
        raise _refused(RefusalReason.LIFETIME_TOO_LONG, claims, f"is valid for over {MAX_LIFETIME_SECONDS} s")
    if claims.issued_at < created_at:  # no skew: what was seen before that, nobody remembers
        raise _refused(
            RefusalReason.ISSUED_BEFORE_THIS_OUTBOX,
            claims,
            f"was issued at {claims.issued_at.isoformat()}, before the outbox was made at {created_at.isoformat()}",
        )
    if starts - skew > now:
        raise _refused(RefusalReason.NOT_YET_VALID, claims, f"is not valid before {starts.isoformat()}")
    if now >= claims.expires_at + skew:
        raise _refused(RefusalReason.EXPIRED, claims, f"expired at {claims.expires_at.isoformat()}")


def _refused(reason: RefusalReason, claims: Claims, what: str) -> DecisionRefused:
    message = f"The decision {claims.decision_id} signed by {claims.approver} {what}."
    return DecisionRefused(reason, message, approver=claims.approver, claims=claims)
