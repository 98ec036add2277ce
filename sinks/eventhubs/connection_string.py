"""Reads connection strings of Event Hubs and creates shared access signatures.

A connection string has the form `Endpoint=sb://NAMESPACE/;SharedAccessKeyName=NAME;SharedAccessKey=KEY;EntityPath=HUB`.
Error messages do not contain values of the connection string, because a value can be the key.

Sources: Microsoft, "Get an Event Hubs connection string" and "Generate a Shared Access Signature token".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from urllib.parse import quote_plus, urlsplit

from bridge.sink import DeliveryFailed

_WHERE = "Copy it again from the portal: Event Hubs namespace, Shared access policies."


@dataclass(frozen=True, kw_only=True)
class ConnectionString:
    """The values in a connection string."""

    text: str = field(repr=False)
    namespace: str
    eventhub: str
    key_name: str
    key: str = field(repr=False)


def parse(text: str, *, eventhub: str | None) -> ConnectionString:
    """Return the values of *text*, with *eventhub* as the EntityPath unless it is None."""
    parts = {}
    for part in text.split(";"):
        name, _, value = part.strip().partition("=")
        parts[name.lower()] = value
    endpoint = urlsplit(parts.get("endpoint", ""))
    namespace = endpoint.netloc
    if not namespace:
        raise _wrong("has no Endpoint=sb://...")
    key_name, key = parts.get("sharedaccesskeyname"), parts.get("sharedaccesskey")
    if not key_name or not key:
        raise _wrong("does not have both SharedAccessKeyName and SharedAccessKey")
    hub = eventhub or parts.get("entitypath")
    if not hub:
        raise _wrong("has no EntityPath, and eventhub is not set. Set eventhub to the event hub's name")
    return ConnectionString(
        text=text,
        namespace=namespace,
        eventhub=hub,
        key_name=key_name,
        key=key,
    )


def shared_access_signature(uri: str, *, key_name: str, key: str, expires_on: int) -> str:
    """Return a shared access signature for *uri* that expires at *expires_on* (Unix time)."""
    resource = quote_plus(uri)
    signed = f"{resource}\n{expires_on}".encode()
    signature = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    return f"SharedAccessSignature sr={resource}&sig={quote_plus(signature)}&se={expires_on}&skn={quote_plus(key_name)}"


def _wrong(what: str) -> DeliveryFailed:
    return DeliveryFailed(f"The connection string {what}. {_WHERE}", needs_attention=True)
