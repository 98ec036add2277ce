"""What a decision claims, read strictly: one meaning for each byte, or none.

Two parsers that read one text differently are how signed things get forged. So a member that occurs twice, a number
that is no finite number, a list where one text belongs, and text that is not Unicode are refused here, whatever a
library would make of them. Members that this version does not know are passed over: they may mean something to others.

Nothing here knows a key or a clock; `bridge.approval.decision` says whether what was read counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any

import msgspec

from bridge.text import one_line

MAX_REASON_CHARACTERS = 256
MAX_EVENT_ID_CHARACTERS = 256
#: The end of the year 9999, the last that a datetime can be.
LAST_SECOND = 253402300799

_MAX_DIGITS = 20
_JTI = re.compile(r"[\x21-\x7e]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Verdict(str, Enum):
    """What was decided."""

    APPROVE = "approve"
    HOLD = "hold"


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """The claims of a token whose signature verified, and whose key it was."""

    kid: str
    approver: str
    """Who the key speaks for."""
    key_sha256: str
    """Of the public key's 32 bytes: two names for one key are still one key."""
    issuer: str
    """``iss``; a decision counts only when it is the approver."""
    audience: str
    """``aud``, as it came."""
    event_id: str
    """``sub``"""
    decision_id: str
    """``jti``"""
    issued_at: datetime
    """``iat``, UTC, to the microsecond; the newest wins."""
    expires_at: datetime
    """``exp``; limits when a decision may be accepted, not when it is carried out."""
    not_valid_before: datetime | None = None
    """``nbf``"""
    verdict: Verdict
    reason: str | None = None
    """Fit for one line of a log: at most 256 printable characters."""
    event_digest: str
    payload_sha256: str
    """Of the signed bytes: a ``jti`` that comes again with another one is not the same decision."""


class Decision(Claims, frozen=True, kw_only=True):
    """Claims that were accepted."""


class ClaimsMalformed(ValueError):
    """The text is no JSON object, or a member of it is not what it must be."""


def strict_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object (RFC 8259) that *text* holds; raise ClaimsMalformed on any doubt."""
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except ClaimsMalformed:
        raise
    except (ValueError, RecursionError):
        raise ClaimsMalformed("it is not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise ClaimsMalformed("it is no JSON object")
    return value


def read_claims(payload: bytes, *, kid: str, approver: str, key_sha256: str) -> Claims:
    """Return the claims in *payload*; raise ClaimsMalformed with the name of the first that is wrong or missing."""
    members = strict_object(payload)
    issued_at, expires_at = _date(members, "iat"), _date(members, "exp")
    if expires_at <= issued_at:
        raise ClaimsMalformed("exp is not after iat")
    return Claims(
        kid=kid,
        approver=approver,
        key_sha256=key_sha256,
        issuer=_text(members, "iss"),
        audience=_text(members, "aud"),
        event_id=_text(members, "sub", most=MAX_EVENT_ID_CHARACTERS),
        decision_id=_matching(members, "jti", _JTI, "1 to 128 visible ASCII characters"),
        issued_at=issued_at,
        expires_at=expires_at,
        not_valid_before=None if members.get("nbf") is None else _date(members, "nbf"),
        verdict=_verdict(members),
        reason=_reason(members),
        event_digest=_matching(members, "event_digest", _DIGEST, "64 lower-case hexadecimal digits"),
        payload_sha256=hashlib.sha256(payload).hexdigest(),
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ClaimsMalformed("a member occurs twice")
    return members


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ClaimsMalformed(f"an integer has more than {_MAX_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ClaimsMalformed("a number is out of range")
    return number


def _refuse_constant(name: str) -> Any:
    raise ClaimsMalformed(f"{name} is not JSON")


def _text(members: dict[str, Any], name: str, *, most: int = 128) -> str:
    value = members.get(name)
    if type(value) is not str or not 1 <= len(value) <= most or not value.isprintable():
        raise ClaimsMalformed(f"{name} is not a text of 1 to {most} printable characters")
    return value


def _matching(members: dict[str, Any], name: str, pattern: re.Pattern[str], what: str) -> str:
    value = members.get(name)
    if type(value) is not str or pattern.fullmatch(value) is None:
        raise ClaimsMalformed(f"{name} is not {what}")
    return value


def _date(members: dict[str, Any], name: str) -> datetime:
    """Return a NumericDate (RFC 7519 section 2): seconds since 1970, fractions allowed."""
    value = members.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LAST_SECOND:
        raise ClaimsMalformed(f"{name} is not a number of seconds since 1970")
    return _EPOCH + timedelta(seconds=value)


def _verdict(members: dict[str, Any]) -> Verdict:
    value = members.get("decision")
    if type(value) is not str or value not in {"approve", "hold"}:
        raise ClaimsMalformed("decision is neither approve nor hold")
    return Verdict(value)


def _reason(members: dict[str, Any]) -> str | None:
    """Return the reason fit to be shown: a hold must not fail for the line break in its reason."""
    value = members.get("reason")
    if value is None:
        return None
    if type(value) is not str:
        raise ClaimsMalformed("reason is not a text")
    return one_line(value, MAX_REASON_CHARACTERS)
