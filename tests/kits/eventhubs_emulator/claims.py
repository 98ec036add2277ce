"""Checks the tokens that clients put to `$cbs`: shared access signatures, and JWTs of Microsoft Entra ID.

The emulator checks a shared access signature completely (HMAC, expiry, resource). Of a JWT, it checks only the form,
the audience, and the expiry, because the tokens of the simulator have no valid signature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from urllib.parse import parse_qs, quote_plus, urlsplit

SAS_TYPE = "servicebus.windows.net:sastoken"
JWT_TYPE = "jwt"
AUDIENCE = "https://eventhubs.azure.net"


def refusal(token: str, token_type: str, audience: str, *, hub: str, key_name: str, key: str) -> str:
    """Return the reason why *token* grants no access to *hub*, or an empty string."""
    if urlsplit(audience).path.strip("/").split("/")[0] != hub:
        return f"the token is put for {audience!r}, not for {hub!r}"
    if token_type == SAS_TYPE:
        return sas_refusal(token, audience, key_name=key_name, key=key)
    if token_type == JWT_TYPE:
        return jwt_refusal(token)
    return f"token type {token_type!r} is not known"


def sas_refusal(token: str, audience: str, *, key_name: str, key: str) -> str:
    """Return the problem of a shared access signature, or an empty string."""
    scheme, _, rest = token.partition(" ")
    fields = {name: values[0] for name, values in parse_qs(rest).items()}
    if scheme != "SharedAccessSignature" or not {"sr", "sig", "se", "skn"} <= fields.keys():
        return "no shared access signature"
    if not audience.rstrip("/").lower().startswith(fields["sr"].rstrip("/").lower()):
        return f"signed for {fields['sr']!r}, put for {audience!r}"
    signed = f"{quote_plus(fields['sr'])}\n{fields['se']}".encode()
    right = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    if fields["skn"] != key_name or not hmac.compare_digest(right, fields["sig"]):
        return "the signature does not fit"
    return "" if int(fields["se"]) > time.time() else "the signature has expired"


def jwt_refusal(token: str) -> str:
    """Return the problem of a JWT, or an empty string."""
    parts = token.split(".")
    if len(parts) != 3:
        return "no JWT"
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return "the payload of the JWT is no JSON"
    if str(claims.get("aud", "")).rstrip("/") != AUDIENCE:
        return f"the audience is {claims.get('aud')!r}"
    return "" if float(claims.get("exp", 0)) > time.time() else "the JWT has expired"
