"""Checks settings. Each error message completes a sentence that starts with "KEY must be"."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from bridge.config.toml import Check, check_url
from bridge.http.failures import is_loopback
from bridge.portal.grants import scope_group

_HIGHEST_PORT = 65535


def address_of(listen: str) -> tuple[str, int]:
    """Return the host of *listen*, without the brackets of IPv6, and its port.

    Raise ValueError unless *listen* is an address and a port.
    """
    host, _, port = listen.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    ipaddress.ip_address(host)
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > _HIGHEST_PORT:
        raise ValueError(listen)
    return host, int(port)


#: Microsoft publishes the certificates of its certificate authorities at these URLs.
AUTHORITIES_URLS = ("https://www.microsoft.com/pkiops/certs", "https://www.microsoft.com/pki/mscorp")


def authorities_url(value: str) -> None:
    """Raise ValueError unless *value* is a URL with a path."""
    wanted = f"an address with a path, such as {AUTHORITIES_URLS[0]}"
    if not check_url(value, wanted).path.strip("/"):
        raise ValueError(wanted)


def issuer(value: str) -> None:
    """Raise ValueError unless *value* is the URL of a provider."""
    wanted = "an https URL, such as https://login.example.net/realms/ops"
    parts = check_url(value, wanted)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ValueError(wanted)


def origin(value: str) -> None:
    """Raise ValueError unless *value* consists of a scheme and a host, without a path."""
    wanted = "a scheme and a host without a path, such as https://portal.example.net"
    parts = check_url(value, wanted)
    if value.lower() != f"{parts.scheme}://{parts.netloc}".lower():
        raise ValueError(wanted)


def uuid(value: str) -> None:
    """Raise ValueError unless *value* is a UUID."""
    if not re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value):
        raise ValueError("the id of a subscription, a UUID")


def _accepted_by(parse: Callable[[str], object], wanted: str) -> Check:
    """Return a check that accepts every value for which *parse* raises no ValueError."""

    def rule(value: str) -> None:
        try:
            parse(value)
        except ValueError:
            raise ValueError(wanted) from None

    return Check(rule)


LISTEN = _accepted_by(
    address_of,
    '"address:port", such as "127.0.0.1:8443", "0.0.0.0:8443" or "[::1]:8443". Port 0 selects a free port',
)
ADDRESS = _accepted_by(ipaddress.ip_address, 'an IP address, such as "127.0.0.1"')
NETWORK = _accepted_by(ipaddress.ip_network, 'an IP address or a network, such as "10.1.0.0/24"')
SCOPE = _accepted_by(scope_group, "resource_group:NAME or labels.NAME:VALUE")
