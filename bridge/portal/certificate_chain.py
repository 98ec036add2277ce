"""Finds and downloads the intermediate certificates of attested documents.

A signer's certificate contains the URL of its issuer's certificate (caIssuers). The URL could come from an attacker, so
the portal uses it only if it starts with a configured URL and has no query.

The portal downloads a certificate only if a document has no chain to a trusted root. Because an attacker could send
many forged documents, the portal requests each URL at most once in five minutes, and at most ten URLs per minute. It
never trusts a downloaded certificate as a root.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import requests
from asn1crypto import pem
from asn1crypto.x509 import Certificate
from cryptography import x509
from cryptography.x509.oid import AuthorityInformationAccessOID

from bridge.clock import Clock
from bridge.errors import BridgeError, ConfigurationError
from bridge.http.failures import root_cause
from bridge.http.session import DeadlineSession
from bridge.logs import ThrottledLog

logger = logging.getLogger(__name__)

MAX_CERTIFICATE_BYTES = 16 * 1024
_DEADLINE_SECONDS = 3.0
_AGAIN_SECONDS = 300.0
_MOST_KEPT = 64
_MOST_FETCHES, _FETCHES_SECONDS = 10, 60.0
#: Some chains include a Microsoft root certificate that another root has signed.
_MOST_STEPS = 3
_MOST_ADDRESSES = 2  # for each certificate, so that one certificate cannot use all downloads of a minute
#: A path without dot segments, so that it cannot leave the path of the base URL.
_PATH = r"(?:/(?:\w|%20)(?:[\w.()-]|%20)*)+"

#: Common names of Azure's root certificates (Microsoft, "Azure Certificate Authority details"). The package certifi
#: contains these certificates.
_AZURE_ROOTS = {
    "DigiCert Global Root CA",
    "DigiCert Global Root G2",
    "DigiCert Global Root G3",
    "DigiCert TLS RSA4096 Root G5",
    "DigiCert TLS ECC P384 Root G5",
    "Microsoft RSA Root Certificate Authority 2017",
    "Microsoft ECC Root Certificate Authority 2017",
    "Microsoft TLS RSA Root G2",
    "Microsoft TLS ECC Root G2",
}


@dataclass(kw_only=True, eq=False)
class IntermediateCertificates:
    """Finds intermediate certificates in *known* and below *base_urls*. Thread-safe."""

    clock: Clock
    base_urls: Sequence[str]
    known: Sequence[x509.Certificate] = ()

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._fetched: dict[str, tuple[float, x509.Certificate | None]] = {}
        """For each URL, the time of the last download, and the last certificate or None."""
        self._log = ThrottledLog(logger, clock=self.clock)

    def available(self) -> tuple[x509.Certificate, ...]:
        """Return the known certificates and the downloaded certificates."""
        fetched = [certificate for _, certificate in list(self._fetched.values()) if certificate is not None]
        return (*self.known, *fetched)

    def fetch_for(self, certificate: x509.Certificate) -> None:
        """Download the issuer certificates above *certificate* in its chain."""
        certificates = [certificate]
        for _ in range(_MOST_STEPS):
            addresses = [address for each in certificates for address in _issuer_addresses(each)]
            urls = [url for address in addresses for base in self.base_urls if (url := _below(base, address))]
            with self._lock:
                certificates = [found for url in urls if (found := self._certificate_at(url)) is not None]

    def _certificate_at(self, url: str) -> x509.Certificate | None:
        now = self.clock.monotonic()
        fetched_at, found = self._fetched.get(url, (-math.inf, None))
        recent = sum(now - at < _FETCHES_SECONDS for at, _ in self._fetched.values())
        if now - fetched_at < _AGAIN_SECONDS or recent >= _MOST_FETCHES:
            return found
        try:
            found = _fetch(url)
        except BridgeError as error:  # keep a certificate from an earlier download
            self._log.problem("fetch", logging.WARNING, str(error))
        self._fetched.pop(url, None)
        self._fetched[url] = now, found
        if len(self._fetched) > _MOST_KEPT:
            del self._fetched[next(iter(self._fetched))]
        return found


def azure_roots() -> tuple[x509.Certificate, ...]:
    """Return Azure's root certificates from certifi."""
    import certifi  # noqa: PLC0415  # not needed with configured roots

    found = pem.unarmor(Path(certifi.where()).read_bytes(), multiple=True)
    # Load only Azure's roots, because the package cryptography logs a warning for one of the other roots.
    return tuple(
        x509.load_der_x509_certificate(der)
        for _, _, der in found
        if Certificate.load(der).subject.native.get("common_name") in _AZURE_ROOTS
    )


def certificates_in(path: Path) -> tuple[x509.Certificate, ...]:
    """Return the certificates in the PEM file at *path*.

    Raise ConfigurationError if the file contains no readable certificate.
    """
    try:
        return tuple(x509.load_pem_x509_certificates(path.read_bytes()))
    except OSError as error:
        raise ConfigurationError(f"The certificates {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} contains no readable certificates in PEM format.") from error


def _fetch(url: str) -> x509.Certificate:
    """Return the certificate at *url*.

    Error messages contain only the scheme and the host of the URL, because the path could come from an attacker.
    """
    where = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    try:
        with DeadlineSession() as session:
            response = session.request(
                "GET",
                url,
                deadline_seconds=_DEADLINE_SECONDS,
                max_body_bytes=MAX_CERTIFICATE_BYTES,
                proxies=requests.utils.get_environ_proxies(url),
            )
    except (requests.RequestException, BridgeError, OSError) as error:
        reason = str(error) if isinstance(error, BridgeError) else type(root_cause(error)).__name__
        raise BridgeError(f"The intermediate certificate at {where} cannot be downloaded: {reason}") from error
    try:
        is_pem = response.content.lstrip().startswith(b"-----BEGIN")
        return (x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate)(response.content)
    except ValueError as error:
        raise BridgeError(f"The response from {where} is not a certificate (status {response.status_code}).") from error


def _issuer_addresses(certificate: x509.Certificate) -> list[str]:
    try:
        access = certificate.extensions.get_extension_for_class(x509.AuthorityInformationAccess).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return []
    return [
        each.access_location.value
        for each in access
        if each.access_method == AuthorityInformationAccessOID.CA_ISSUERS
        and isinstance(each.access_location, x509.UniformResourceIdentifier)
    ][:_MOST_ADDRESSES]


def _below(base: str, address: str) -> str | None:
    """Return *address* with the scheme of *base*, or None if it is not below *base*."""
    scheme, _, place = base.rstrip("/").partition("://")
    found = re.fullmatch(f"https?://({re.escape(place)}{_PATH})", address, re.ASCII)
    return None if found is None else f"{scheme}://{found[1]}"
