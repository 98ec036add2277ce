"""Generates the test vectors for decisions: tokens that an agent must accept or refuse, and event digests.

    python tests/unit/vectors/make.py     writes digests.json and decisions.json

Authors of portals in other languages can test with the JSON files. This project's tests compare the files with its own
code. The private keys are derived from sentences in this file, so never trust one of these keys on a real VM.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bridge.approval.digest import canonical_json, digest
from bridge.events.event import ScheduledEvent

HERE = Path(__file__).parent
VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
NOW = 1795172400  # 2026-11-20T11:00:00Z
CREATED_AT = NOW - 7200
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point, RFC 8032 section 5.1

EVENT = ScheduledEvent(
    event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    event_type="Freeze",
    event_status="Scheduled",
    resource_type="VirtualMachine",
    resources=("WestNO_1", "WestNO_0"),
    not_before_raw="Fri, 20 Nov 2026 11:15:00 GMT",
    event_source="Platform",
    duration_seconds=5,
)


@dataclass(frozen=True, kw_only=True)
class Signer:
    kid: str
    approver: str
    key: Ed25519PrivateKey

    @property
    def public_pem(self) -> str:
        return (
            self.key.public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode()
        )

    @property
    def private_pem(self) -> str:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()


def signer(kid: str, approver: str) -> Signer:
    seed = hashlib.sha256(f"scheduled-events-bridge test key {kid}".encode()).digest()
    return Signer(kid=kid, approver=approver, key=Ed25519PrivateKey.from_private_bytes(seed))


PORTAL = signer("ops-2026", "portal")
PORTAL_NEXT = signer("ops-2027", "portal")
ALICE = signer("alice-laptop", "alice")
STRANGER = signer("stranger", "stranger")
TRUSTED = (PORTAL, PORTAL_NEXT, ALICE)


def b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def unb64(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def claims(**changes: Any) -> dict[str, Any]:
    """Return valid claims with *changes*. A claim whose value is ``...`` is omitted."""
    good = {
        "iss": "portal",
        "aud": VM_ID,
        "sub": EVENT.event_id,
        "jti": "0d4c1f8e-52f3-4d38-8a55-2f6f4d1c9e01",
        "iat": NOW - 60,
        "exp": NOW + 3600,
        "decision": "approve",
        "reason": "drained by the night shift",
        "event_digest": digest(EVENT),
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def header(**changes: Any) -> dict[str, Any]:
    good = {"alg": "EdDSA", "kid": PORTAL.kid, "typ": "scheduled-events-decision+jwt"}
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def token(
    payload: bytes | dict[str, Any] | None = None,
    head: bytes | dict[str, Any] | None = None,
    *,
    by: Signer = PORTAL,
) -> str:
    """Return a token signed *by*, with any header and payload."""
    head = header(kid=by.kid) if head is None else head
    payload = claims(iss=by.approver) if payload is None else payload
    text = ".".join(b64(part if isinstance(part, bytes) else compact(part)) for part in (head, payload))
    return text + "." + b64(by.key.sign(text.encode()))


def _accepted() -> Iterator[tuple[str, str]]:
    yield "approve", token()
    yield "hold", token(claims(decision="hold", jti="hold-1"))
    for what, times in (
        ("late: exp passed a day ago", {"iat": NOW - 90000, "exp": NOW - 86400}),
        ("early: iat an hour ahead", {"iat": NOW + 3600, "exp": NOW + 7200}),
        ("early: nbf an hour ahead", {"nbf": NOW + 3600, "exp": NOW + 7200}),
        ("old: decided before the database was made", {"iat": CREATED_AT - 3600}),
        ("for a week", {"exp": NOW + 7 * 86400}),
    ):
        yield f"hold, {what}", token(claims(decision="hold", **times))
    yield "by the next key of the same approver", token(by=PORTAL_NEXT)
    yield "by another approver", token(by=ALICE)
    yield "vmId in upper case", token(claims(aud=VM_ID.upper()))
    yield "dates with fractions", token(claims(iat=NOW - 59.5, exp=NOW + 0.25, jti="fractions"))
    yield "iat 59 s ahead: the clocks differ", token(claims(iat=NOW + 59))
    yield "expired 59 s ago: the clocks differ", token(claims(exp=NOW - 59, iat=NOW - 120))
    yield "nbf passed", token(claims(nbf=NOW - 30))
    yield "valid for exactly 24 h", token(claims(iat=NOW - 60, exp=NOW - 60 + 86400))
    yield "no reason", token(claims(reason=...))
    yield (
        "a reason with line breaks and other alphabets",
        token(claims(reason="line 1\nline 2 \u001b[31m é 日本 \u202e")),
    )
    yield "a reason that is cut", token(claims(reason="x" * 300))
    yield "nbf and reason are null", token(claims(nbf=None, reason=None))
    yield "half an emoji in the reason", token(claims(reason="cut \ud83d"))
    yield "half an emoji in a claim nobody knows here, and in its name", token(claims(**{"\ud83d": "\ud83d"}))
    yield "claims nobody knows here", token(claims(ticket={"id": [1, 2, None]}, scope="*"))
    yield (
        "header members in another order, with spaces",
        token(head=b'{ "typ": "scheduled-events-decision+jwt", "alg": "EdDSA", "kid": "ops-2026" }'),
    )


def _refused_unread() -> Iterator[tuple[str, str, str]]:  # noqa: PLR0915 - a list
    good = token()
    head, payload, signature = good.split(".")
    none = b64(compact(header(alg="none")))
    yield "malformed", "empty", ""
    yield "malformed", "one part", head
    yield "malformed", "two parts", f"{head}.{payload}"
    yield "malformed", "four parts", f"{good}.{signature}"
    yield "malformed", "a dot at the end", f"{good}."
    yield "malformed", "a line break at the end", f"{good}\n"
    yield "malformed", "a space before", f" {good}"
    yield "malformed", "padding", f"{good}=="
    yield "malformed", "padding on the payload", f"{head}.{payload}=.{signature}"
    yield "malformed", "a line break within", f"{head}.{payload[:8]}\n{payload[8:]}.{signature}"
    yield "malformed", "the standard alphabet of base64", f"{head}.{payload}.{'+/' + signature[2:]}"
    yield "malformed", "signature not canonical", good[:-1] + _next_in_alphabet(good[-1])
    yield "malformed", "payload not canonical", f"{head}.{_respelled(payload)}.{signature}"
    yield "malformed", "header not canonical", f"{_respelled(head)}.{payload}.{signature}"
    yield "malformed", "detached payload", f"{head}..{signature}"
    yield "malformed", "no signature", f"{head}.{payload}."
    yield "malformed", "signature too short", f"{head}.{payload}.{b64(unb64(signature)[:63])}"
    yield "malformed", "signature too long", f"{head}.{payload}.{b64(unb64(signature) + b'x')}"
    yield "malformed", "too large", token(claims(padding="x" * 8192))
    yield "malformed", "header too large", token(head=header(kid="k" * 1000))
    yield "malformed", "header of wide characters", "\uff45" + good[1:]
    yield "malformed", "header is a list", token(head=compact([header()]))
    yield "malformed", "header is no JSON", token(head=b"alg: EdDSA")
    yield "malformed", "header is UTF-16", token(head=json.dumps(header()).encode("utf-16"))
    yield "malformed", "header nests deeply", token(head=b"[" * 380)
    yield "malformed", "header says alg twice", token(head=b'{"alg":"none",' + compact(header())[1:])
    yield "malformed", "header says kid twice", token(head=b'{"kid":"alice-laptop",' + compact(header())[1:])
    yield "malformed", "the JSON form of a JWS", json.dumps({"protected": head, "payload": payload})
    yield "bad_algorithm", "alg none, unsigned", f"{none}.{payload}."
    yield "bad_algorithm", "alg none, with a signature", f"{none}.{payload}.{signature}"
    yield "bad_algorithm", "alg None", token(head=header(alg="None"))
    yield "bad_algorithm", "alg missing", token(head=header(alg=...))
    yield "bad_algorithm", "alg null", token(head=header(alg=None))
    yield "bad_algorithm", "alg a list", token(head=header(alg=["EdDSA"]))
    yield "bad_algorithm", "alg in lower case", token(head=header(alg="eddsa"))
    yield "bad_algorithm", "alg Ed25519", token(head=header(alg="Ed25519"))
    yield "bad_algorithm", "HS256 with the public key as the secret", _with_hmac(PORTAL.public_pem.encode())
    yield "bad_algorithm", "HS256 with the raw public key", _with_hmac(PORTAL.key.public_key().public_bytes_raw())
    yield "bad_algorithm", "ES256", token(head=header(alg="ES256"))
    yield "bad_type", "typ JWT", token(head=header(typ="JWT"))
    yield "bad_type", "typ missing", token(head=header(typ=...))
    yield "bad_type", "typ in upper case", token(head=header(typ="SCHEDULED-EVENTS-DECISION+JWT"))
    yield "bad_type", "typ as a media type", token(head=header(typ="application/scheduled-events-decision+jwt"))
    yield "bad_header", "crit", token(head=header(crit=["exp"]))
    yield "bad_header", "b64 false", token(head=header(b64=False, crit=["b64"]))
    yield "bad_header", "b64 false, not critical", token(head=header(b64=False))
    yield "bad_header", "jku", token(head=header(jku="https://attacker.example/keys"))
    yield "bad_header", "x5u", token(head=header(x5u="https://attacker.example/c"))
    yield (
        "bad_header",
        "jwk: a key of its own",
        token(
            head=header(
                jwk={"kty": "OKP", "crv": "Ed25519", "x": b64(STRANGER.key.public_key().public_bytes_raw())},
            ),
            by=STRANGER,
        ),
    )
    yield "bad_header", "cty", token(head=header(cty="JWT"))
    yield "unknown_key", "a stranger's kid", token(by=STRANGER)
    yield "unknown_key", "kid missing", token(head=header(kid=...))
    yield "unknown_key", "kid null", token(head=header(kid=None))
    yield "unknown_key", "kid a number", token(head=header(kid=0))
    yield "unknown_key", "kid a list", token(head=header(kid=["ops-2026"]))
    yield "unknown_key", "kid is a path", token(head=header(kid="../../../../etc/scheduled-events-bridge/ops-2026.pub"))
    yield "unknown_key", "kid is SQL", token(head=header(kid="x' OR '1'='1"))
    yield "unknown_key", "kid in another case", token(head=header(kid="OPS-2026"))
    yield "unknown_key", "kid with a space", token(head=header(kid="ops-2026 "))
    yield "forged", "a stranger with our kid", token(head=header(), by=STRANGER)
    yield "forged", "another approver's key with our kid", token(head=header(), by=ALICE)
    yield "forged", "the signature of another payload", f"{head}.{b64(compact(claims(decision='hold')))}.{signature}"
    yield "forged", "the signature of another header", f"{b64(compact(header(kid=ALICE.kid)))}.{payload}.{signature}"
    yield "forged", "a signature of zeros", f"{head}.{payload}.{b64(bytes(64))}"
    yield "forged", "one bit of the signature", f"{head}.{payload}.{b64(_flip(unb64(signature)))}"
    yield (
        "forged",
        "S plus the order: the same signature in other words",
        f"{head}.{payload}.{b64(_plus_order(signature))}",
    )
    yield "forged", "signed over the payload alone", f"{head}.{payload}.{b64(PORTAL.key.sign(payload.encode()))}"


def _refused_signed() -> Iterator[tuple[str, str, str]]:
    good = compact(claims())
    for name in ("iss", "aud", "sub", "jti", "iat", "exp", "decision", "event_digest"):
        yield "malformed_claims", f"{name} missing", token(claims(**{name: ...}))
        yield "malformed_claims", f"{name} null", token(claims(**{name: None}))
        yield "malformed_claims", f"{name} a list", token(claims(**{name: [claims()[name]]}))
    for name in ("iat", "exp", "nbf"):
        for what, value in (("true", True), ("a text", str(NOW)), ("negative", -1), ("beyond the year 9999", 1e15)):
            yield "malformed_claims", f"{name} {what}", token(claims(**{name: value}))
    for what, number in (("NaN", b"NaN"), ("Infinity", b"Infinity"), ("1e999", b"1e999"), ("huge", b"9" * 5000)):
        yield "malformed_claims", f"exp {what}", token(_with_exp(number))
        yield "malformed_claims", f"an unknown claim {what}", token(good[:-1] + b',"x":' + number + b"}")
    yield "malformed_claims", "aud a list of two", token(claims(aud=[VM_ID, "other"]))
    yield "malformed_claims", "jti empty", token(claims(jti=""))
    yield "malformed_claims", "jti of 129 characters", token(claims(jti="x" * 129))
    yield "malformed_claims", "jti with a space", token(claims(jti="a b"))
    yield "malformed_claims", "jti with a line break at the end", token(claims(jti="a\n"))
    yield "malformed_claims", "sub with a line break", token(claims(sub="a\nb"))
    yield "malformed_claims", "sub with half a surrogate pair", token(claims(sub="\ud800"))
    yield "malformed_claims", "decision APPROVE", token(claims(decision="APPROVE"))
    yield "malformed_claims", "decision approved", token(claims(decision="approved"))
    yield "malformed_claims", "reason a number", token(claims(reason=1))
    yield "malformed_claims", "digest in upper case", token(claims(event_digest=digest(EVENT).upper()))
    yield "malformed_claims", "digest too short", token(claims(event_digest=digest(EVENT)[:-1]))
    yield "malformed_claims", "exp equals iat", token(claims(exp=NOW - 60))
    yield "malformed_claims", "exp before iat", token(claims(exp=NOW - 61))
    yield "malformed_claims", "decision twice", token(b'{"decision":"hold",' + good[1:])
    yield "malformed_claims", "a member twice within an unknown claim", token(good[:-1] + b',"x":{"a":1,"a":2}}')
    yield "malformed_claims", "decision twice, once in escapes", token(b'{"\\u0064ecision":"hold",' + good[1:])
    yield "malformed_claims", "no JSON", token(b"approve")
    yield "malformed_claims", "a list", token(b"[]")
    yield "malformed_claims", "something after the object", token(good + b"{}")
    yield "malformed_claims", "a byte order mark", token(b"\xef\xbb\xbf" + good)
    yield "malformed_claims", "no UTF-8", token(good.replace(b"night", b"n\xffght"))
    yield "malformed_claims", "nests deeply", token(b"[" * 5900)
    yield "wrong_issuer", "iss of another approver", token(claims(iss="alice"))
    yield "wrong_issuer", "iss in another case", token(claims(iss="Portal"))
    yield "wrong_issuer", "alice says she is the portal", token(claims(), by=ALICE)
    yield "wrong_audience", "another VM", token(claims(aud="0" * 8 + VM_ID[8:]))
    yield "wrong_audience", "the name of the VM", token(claims(aud="WestNO_0"))
    yield "wrong_audience", "vmId with braces", token(claims(aud="{" + VM_ID + "}"))
    yield "wrong_audience", "vmId with a Cyrillic letter", token(claims(aud=VM_ID.replace("a", "\u0430")))
    yield "wrong_audience", "vmId with wide digits", token(claims(aud=VM_ID.replace("7", "\uff17")))
    yield "wrong_audience", "*", token(claims(aud="*"))
    yield "lifetime_too_long", "24 h and a second", token(claims(exp=NOW - 60 + 86401))
    yield "lifetime_too_long", "for ever", token(claims(exp=253402300799))
    yield "issued_before_this_outbox", "a second before", token(claims(iat=CREATED_AT - 1))
    yield "issued_before_this_outbox", "in 1970", token(claims(iat=0, exp=60))
    yield "not_yet_valid", "iat 61 s ahead", token(claims(iat=NOW + 61))
    yield "not_yet_valid", "nbf 61 s ahead", token(claims(nbf=NOW + 61))
    yield "expired", "60 s ago", token(claims(exp=NOW - 60, iat=NOW - 120))
    yield "expired", "an hour ago", token(claims(exp=NOW - 3600, iat=NOW - 3660))


def _with_hmac(secret: bytes) -> str:
    text = f"{b64(compact(header(alg='HS256')))}.{b64(compact(claims()))}"
    return f"{text}.{b64(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def _with_exp(number: bytes) -> bytes:
    return compact(claims(exp=...))[:-1] + b',"exp":' + number + b"}"


def _next_in_alphabet(character: str) -> str:
    return {"A": "B", "Q": "R", "g": "h", "w": "x"}[character]


def _respelled(segment: str) -> str:
    """Return an invalid Base64 spelling of *segment*: an unused bit set, or one more character."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    if len(segment) % 4 == 0:
        return segment + "A"
    return segment[:-1] + alphabet[alphabet.index(segment[-1]) | 1]


def _flip(signature: bytes) -> bytes:
    return bytes([signature[0] ^ 1]) + signature[1:]


def _plus_order(signature: str) -> bytes:
    raw = unb64(signature)
    return raw[:32] + (int.from_bytes(raw[32:], "little") + ORDER).to_bytes(32, "little")


def decisions() -> dict[str, Any]:
    """Return decisions.json."""
    cases = [{"name": name, "refused": None, "token": text} for name, text in _accepted()]
    cases += [
        {"name": name, "refused": reason, "token": text}
        for refused in (_refused_unread(), _refused_signed())
        for reason, name, text in refused
    ]
    return {
        "about": "Tokens and what an agent says to them at `now`. The keys are public: never trust one.",
        "audience": VM_ID,
        "now": NOW,
        "created_at": CREATED_AT,
        "keys": [
            {
                "kid": one.kid,
                "approver": one.approver,
                "public_key_pem": one.public_pem,
                "private_key_pem": one.private_pem,
            }
            for one in TRUSTED
        ],
        "cases": cases,
    }


def _event(**fields: Any) -> ScheduledEvent:
    return ScheduledEvent(**{"event_status": "Scheduled", "event_id": "E", **fields})


def digests() -> dict[str, Any]:
    """Return digests.json."""
    events = {
        "the worked example": EVENT,
        "nothing known but the id": _event(),
        "empty is not null": _event(
            event_type="", event_source="", not_before_raw="", resources=(), duration_seconds=0
        ),
        "duplicates go": _event(resources=("b", "a", "b", "B")),
        "sorted by UTF-16 code units, not by code points": _event(
            resources=("\ufb33", "\U0001f600", "\u20ac", "z", "10", "9")
        ),
        "escapes": _event(event_type='\u0000\b\t\n\u000b\f\r\u001f "\\/\u007f\u0080\u2028\u2029é\U0001f600'),
        "not normalised": _event(event_source="e\u0301", event_type="\u00e9"),
        "the largest exact integer": _event(duration_seconds=2**53 - 1),
        "the first beyond it: a double without a fraction": _event(duration_seconds=2**53),
        "beyond it: as ES6 writes a double": _event(duration_seconds=2**63 - 1),
    }
    return {
        "about": "The `event` of a record, its canonical JSON (RFC 8785) and the SHA-256 of that in UTF-8.",
        "cases": [
            {
                "name": name,
                "event": {
                    "event_id": event.event_id,
                    "event_type": event.event_type,
                    "event_source": event.event_source,
                    "duration_seconds": event.duration_seconds,
                    "resources": None if event.resources is None else list(event.resources),
                    "not_before_raw": event.not_before_raw,
                },
                "canonical_json": canonical_json(event).decode(),
                "sha256": digest(event),
            }
            for name, event in events.items()
        ],
    }


def _one_case_a_line(vectors: dict[str, Any]) -> str:
    cases = ",\n".join(json.dumps(case) for case in vectors["cases"])
    others = json.dumps({name: value for name, value in vectors.items() if name != "cases"}, indent=1)
    return f'{others.removesuffix("}").rstrip()},\n "cases": [\n{cases}\n]}}\n'


def rendered() -> dict[str, str]:
    """Return the text of each vector file by its name."""
    return {"decisions.json": _one_case_a_line(decisions()), "digests.json": _one_case_a_line(digests())}


if __name__ == "__main__":
    for file_name, text in rendered().items():
        (HERE / file_name).write_text(text, encoding="ascii")
