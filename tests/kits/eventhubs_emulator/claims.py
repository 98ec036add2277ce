"""Checks what a client puts to ``$cbs``: a shared access signature, or a JWT of Microsoft Entra ID.

A signature is checked whole (HMAC, expiry, resource). Of a JWT only shape, audience and expiry: whom to trust for its
signature is the business of Entra ID, and the simulator's tokens have none worth checking.
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
    """Return why *token* gives no access to *hub*; empty when it does."""
    if urlsplit(audience).path.strip("/").split("/")[0] != hub:
        return f"the token is put for {audience!r}, not for {hub!r}"
    if token_type == SAS_TYPE:
        return sas_refusal(token, audience, key_name=key_name, key=key)
    if token_type == JWT_TYPE:
        return jwt_refusal(token)
    return f"token type {token_type!r} is not known"


def sas_refusal(token: str, audience: str, *, key_name: str, key: str) -> str:
    """Return what is wrong with a shared access signature; empty when nothing is."""
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
    """Return what is wrong with a JWT; empty when nothing is."""
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
