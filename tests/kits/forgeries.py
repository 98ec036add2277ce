"""Invalid decisions of every kind that PROTOCOL.md rejects before the agent checks the event."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from outside_portal import HEADER, Signer, b64

WRONG_VALUES: tuple[Any, ...] = (None, "", 7, True, [], {}, "x" * 300, "\u0000", float("nan"))


def claims_gone_wrong() -> Iterator[dict[str, Any]]:
    """Return changes of claims that each make a decision invalid. `...` omits a claim."""
    now = time.time()
    for name in ("iss", "aud", "sub", "jti", "iat", "exp", "decision", "event_digest"):
        yield {name: ...}
        for value in WRONG_VALUES:
            yield {name: value}
    yield from (
        {"iss": "boris"},
        {"iss": "Anne"},
        {"iss": "anne "},
        {"aud": "542afd79-4f70-5562-aa13-70d60565ec97"},
        {"aud": "*"},
        {"sub": "*"},
        {"decision": "Approve"},
        {"decision": "approved"},
        {"decision": "deny"},
        {"iat": now + 3600, "exp": now + 7200},
        {"iat": now - 7200, "exp": now - 3600},
        {"iat": now, "exp": now + 86_500},
        {"iat": now, "exp": now},
        {"iat": now, "exp": now - 1},
        {"iat": -1},
        {"exp": 1e300},
        {"exp": 10**25},
        {"iat": str(now)},
        {"nbf": now + 7200},
        {"nbf": "now"},
        {"event_digest": "0" * 64},
        {"event_digest": "A" * 64},
        {"jti": "with space"},
        {"jti": "ü"},
        {"reason": 7},
    )


def headers_gone_wrong(kid: str) -> Iterator[dict[str, Any]]:
    good = {**HEADER, "kid": kid}
    for alg in ("none", "None", "HS256", "RS256", "ES256", "Ed25519", "ed25519", "eddsa", "", None, ["EdDSA"]):
        yield {**good, "alg": alg}
    for typ in ("JWT", "jwt", HEADER["typ"].upper(), f"application/{HEADER['typ']}", "", None):
        yield {**good, "typ": typ}
    for other in ("boris", "nobody", "../anne", "anne.pub", "anne ", "", None, 7, ["anne"]):
        yield {**good, "kid": other}
    for name in ("crit", "jku", "jwk", "x5u", "x5c", "b64", "cty", "zip", "iss", "url"):
        yield {**good, name: ["x"] if name == "crit" else "x"}
    for name in good:
        yield {key: value for key, value in good.items() if key != name}


def forgeries(anne: Signer, boris: Signer, mallory: Signer, record: Mapping[str, Any]) -> Iterator[str]:
    """Return texts of every kind that are not valid decisions on *record* by a trusted key."""
    good = anne.decide(record)
    header, payload, sealed = good.split(".")
    claims = anne.claims(record)
    body = json.dumps(claims).encode()
    head = json.dumps({**HEADER, "kid": "anne"}).encode()
    other_payload = anne.decide(record).split(".")[1]
    for change in claims_gone_wrong():
        changed = {name: value for name, value in {**claims, **change}.items() if value is not ...}
        yield anne.sign(json.dumps(changed).encode())
    for wrong in headers_gone_wrong("anne"):
        yield anne.sign(body, json.dumps(wrong).encode())
    for wrong_body in (
        b"",
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"{",
        body[:-1],
        b"\xef\xbb\xbf" + body,
        body.decode().encode("utf-16"),
    ):
        yield anne.sign(wrong_body)
    yield anne.sign(body[:-1] + b',"decision":"approve"}')
    yield anne.sign(body[:-1] + b',"exp":' + b"9" * 400 + b"}")
    yield anne.sign(body[:-1] + b',"x":NaN}')
    yield anne.sign(body[:-1] + b',"x":"\xff"}')
    yield anne.sign(body[:-1] + b',"reason":"\\ud800"}')
    yield anne.sign(body[:-1] + b',"x":' + b"[" * 3000 + b"]" * 3000 + b"}")
    yield anne.sign(body, head[:-1] + b',"alg":"EdDSA"}')
    yield anne.sign(body, head + b" " * 500)
    yield f"{header}.{payload}."
    yield f"{header}.{payload}"
    yield f"{header}.{other_payload}.{sealed}"
    yield f"{header}.{payload}.{b64(bytes(64))}"
    yield f"{header}.{payload}.{b64(boris.signature(f'{header}.{payload}'.encode()))}"
    yield f"{header}.{payload}.{b64(anne.signature(body))}"
    yield f"{header}.{payload}.{sealed}.{sealed}"
    yield from (
        f" {good}",
        f"{good}\n",
        f"{good}=",
        f"{good}\u0000",
        good.replace(".", " . "),
        good.upper(),
        good[::-1],
    )
    yield f"{header}..{sealed}"
    yield f"{header}.{payload}.{sealed[:-1]}{'B' if sealed[-1] != 'B' else 'C'}"
    yield json.dumps({"protected": header, "payload": payload, "signature": sealed})
    yield mallory.decide(record)
    yield mallory.sign(body, head)
    order = 2**252 + 27742317777372353535851937790883648493
    raw = anne.signature(f"{header}.{payload}".encode())
    scalar = (int.from_bytes(raw[32:], "little") + order).to_bytes(32, "little")
    yield f"{header}.{payload}.{b64(raw[:32] + scalar)}"
    yield "A" * 9000
    yield ""
