"""Checks the values of settings. Each error message follows the words "KEY must be"."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from bridge.http.failures import is_loopback
from bridge.portal.grants import scope_group

_HIGHEST_PORT = 65535


def listen(value: str) -> None:
    """Raise ValueError unless *value* is an address and a port."""
    host, _, port = value.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and int(port) <= _HIGHEST_PORT
    try:
        is_address = host == "localhost" or bool(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        is_address = False
    if not (is_port and is_address):
        raise ValueError(
            '"address:port", such as "127.0.0.1:8443", "0.0.0.0:8443" or "[::1]:8443". Port 0 selects a free port'
        )


#: Microsoft publishes the certificates of its certificate authorities at these URLs.
AUTHORITIES_URLS = ("https://www.microsoft.com/pkiops/certs", "https://www.microsoft.com/pki/mscorp")


def authorities_url(value: str) -> None:
    """Raise ValueError unless *value* is a URL with a path."""
    try:
        parts = urlsplit(value)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and bool(parts.path.strip("/"))
    except ValueError:
        is_usable = False
    if not is_usable or "@" in value or "?" in value or "#" in value:
        raise ValueError(f"an address with a path, such as {AUTHORITIES_URLS[0]}")


def uuid(value: str) -> None:
    """Raise ValueError unless *value* is a UUID."""
    if not re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value):
        raise ValueError("the id of a subscription, a UUID")


def address(value: str) -> None:
    """Raise ValueError unless *value* is an IP address."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError('an IP address, such as "127.0.0.1"') from None


def network(value: str) -> None:
    """Raise ValueError unless *value* is an IP address or a network."""
    try:
        ipaddress.ip_network(value)
    except ValueError:
        raise ValueError('an IP address or a network, such as "10.1.0.0/24"') from None


def scope(value: str) -> None:
    """Raise ValueError unless *value* is a group of VMs."""
    try:
        scope_group(value)
    except ValueError:
        raise ValueError("resource_group:NAME or labels.NAME:VALUE") from None


def issuer(value: str) -> None:
    """Raise ValueError unless *value* is the URL of a provider."""
    try:
        parts = urlsplit(value)
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
        is_usable = is_safe and bool(parts.hostname) and value.isprintable() and " " not in value
    except ValueError:
        is_usable = False
    if not is_usable or "@" in value or "?" in value or "#" in value:
        raise ValueError("an https URL, such as https://login.example.net/realms/ops")
