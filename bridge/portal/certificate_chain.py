"""The certificates of the authorities between Azure's signers and the roots, fetched where they are missing.

A signer's certificate says where its issuer's is to be had (caIssuers). It is a stranger's certificate until that is
known, so what it says is only followed below the addresses that the configuration lists, with the scheme of these, and
without a query; nothing else of it goes into a request. What came is kept for a day, a failure for five minutes, and
few are asked for in a minute: a flood of forged documents costs a few requests. Nothing fetched is trusted: it only
joins a chain, which must end at a root.
"""

from __future__ import annotations

import logging
import posixpath
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
from asn1crypto import pem
from asn1crypto.x509 import Certificate
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import AuthorityInformationAccessOID

from bridge.clock import Clock
from bridge.errors import BridgeError, ConfigurationError
from bridge.http.failures import root_cause
from bridge.http.session import DeadlineSession
from bridge.logs import ThrottledLog
from bridge.portal.settings import AUTHORITIES_URLS

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_CERTIFICATE_BYTES = 16 * 1024
_DEADLINE_SECONDS = 3.0
_KEPT_SECONDS = 86_400.0
_FAILED_SECONDS = 300.0
_MOST_KEPT = 64
_MOST_FETCHES, _FETCHES_SECONDS = 10, 60.0
#: A cross-signed root makes one more.
_MOST_STEPS = 3
_OK = 200
_SCHEMES = frozenset({"http", "https"})

#: The roots that Azure's certificates lead to, by the names of their subjects (Microsoft, "Azure Certificate Authority
#: details"); the certificates themselves are certifi's.
_AZURE_ROOTS = frozenset(
    {
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
)


class IntermediateCertificates:
    """The certificates of *known*, and those that are to be had below *base_urls*; safe to use from many threads."""

    def __init__(
        self,
        *,
        clock: Clock,
        base_urls: Sequence[str] = AUTHORITIES_URLS,
        known: Sequence[x509.Certificate] = (),
    ) -> None:
        self._clock = clock
        self._base_urls = tuple(each.rstrip("/") for each in base_urls)
        self._known = tuple(known)
        self._lock = threading.Lock()
        """Held while one certificate is fetched: one at a time is enough."""
        self._kept: dict[str, tuple[float, x509.Certificate]] = {}
        self._failed: dict[str, float] = {}
        self._fetched_at: deque[float] = deque(maxlen=_MOST_FETCHES)
        self._log = ThrottledLog(logger, clock=clock)

    def available(self) -> tuple[x509.Certificate, ...]:
        """Return every certificate that is known or was fetched."""
        return (*self._known, *(certificate for _, certificate in list(self._kept.values())))

    def fetch_for(self, certificate: x509.Certificate, others: Sequence[x509.Certificate] = ()) -> None:
        """Fetch what is missing between *certificate* and a root; it is then `at_hand`. *beside* may be some of it."""
        for _ in range(_MOST_STEPS):
            here = (*others, *self.available())
            issuer = next((each for each in here if _has_issued(each, certificate)), None)
            if issuer is None:
                issuer = self._fetched_for(certificate)
            if issuer is None or issuer.issuer == issuer.subject:
                return
            certificate = issuer

    def _fetched_for(self, certificate: x509.Certificate) -> x509.Certificate | None:
        for named in _places(certificate):
            url = next(filter(None, (_below(base, named) for base in self._base_urls)), None)
            found = None if url is None else self._at(url)
            if found is not None and _has_issued(found, certificate):
                return found
        return None

    def _at(self, url: str) -> x509.Certificate | None:
        """Return the certificate at *url*, None when there is none for now."""
        with self._lock:
            now = self._clock.monotonic()
            until, kept = self._kept.get(url, (float("-inf"), None))
            is_known = now < max(until, self._failed.get(url, float("-inf")))
            is_too_much = len(self._fetched_at) == _MOST_FETCHES and now - self._fetched_at[0] < _FETCHES_SECONDS
            if is_known or is_too_much:
                return kept
            self._fetched_at.append(now)
            try:
                found = _fetch(url)
            except BridgeError as error:
                # Not the URL: what it says may be a stranger's words.
                self._log.problem("fetch", logging.WARNING, str(error))
                _keep(self._failed, url, now + _FAILED_SECONDS)
                return kept  # of yesterday is better than none
            self._failed.pop(url, None)
            _keep(self._kept, url, (now + _KEPT_SECONDS, found))
            return found


def azure_roots() -> tuple[x509.Certificate, ...]:
    """Return the certificates of the roots that Azure's lead to, as certifi has them."""
    import certifi  # noqa: PLC0415  # only who names no roots of their own

    found = pem.unarmor(Path(certifi.where()).read_bytes(), multiple=True)
    # Only these are read whole: among the others is one that cryptography warns of.
    return tuple(
        x509.load_der_x509_certificate(der)
        for _, _, der in found
        if Certificate.load(der).subject.native.get("common_name") in _AZURE_ROOTS
    )


def certificates_in(path: Path) -> tuple[x509.Certificate, ...]:
    """Return the certificates of the PEM file at *path*; raise ConfigurationError when there is none to be read."""
    try:
        return tuple(x509.load_pem_x509_certificates(path.read_bytes()))
    except OSError as error:
        raise ConfigurationError(f"The certificates {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} holds no certificates in PEM that could be read.") from error


def _keep(table: dict[str, _T], url: str, value: _T) -> None:
    """Put *value* into *table* as its newest, and let the oldest go when there are too many."""
    table.pop(url, None)
    table[url] = value
    while len(table) > _MOST_KEPT:
        del table[next(iter(table))]


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _fetch(url: str) -> x509.Certificate:
    where = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    try:
        with DeadlineSession() as session:
            answer = session.request(
                "GET",
                url,
                deadline_seconds=_DEADLINE_SECONDS,
                max_body_bytes=MAX_CERTIFICATE_BYTES,
                proxies=requests.utils.get_environ_proxies(url),
            )
    except (requests.RequestException, BridgeError, OSError) as error:
        reason = str(error) if isinstance(error, BridgeError) else type(root_cause(error)).__name__
        raise BridgeError(f"The certificate of an authority at {where} cannot be had: {reason}") from error
    if answer.status_code != _OK:
        raise BridgeError(f"The certificate of an authority at {where} cannot be had: status {answer.status_code}.")
    try:
        is_pem = answer.content.lstrip().startswith(b"-----BEGIN")
        return (x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate)(answer.content)
    except ValueError as error:
        raise BridgeError(f"What {where} gave for the certificate of an authority is none.") from error


def _places(certificate: x509.Certificate) -> list[str]:
    """Return where *certificate* says that its issuer's is to be had."""
    try:
        access = certificate.extensions.get_extension_for_class(x509.AuthorityInformationAccess).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return []
    return [
        each.access_location.value
        for each in access
        if each.access_method == AuthorityInformationAccessOID.CA_ISSUERS
        and isinstance(each.access_location, x509.UniformResourceIdentifier)
    ][:2]


def _below(base: str, named: str) -> str | None:
    """Return the URL *named* on scheme and host of *base*, None when it is not below *base*."""
    wanted = urlsplit(base)
    try:
        parts = urlsplit(named)
        is_below = (
            parts.scheme in _SCHEMES
            and (parts.hostname, parts.port) == (wanted.hostname, wanted.port)
            and parts.path.startswith(wanted.path + "/")
        )
    except ValueError:
        return None
    is_plain = posixpath.normpath(unquote(parts.path)) == unquote(parts.path) and "@" not in parts.netloc
    if not is_below or not is_plain or parts.query or parts.fragment or not (named.isascii() and named.isprintable()):
        return None
    return urlunsplit((wanted.scheme, wanted.netloc, parts.path, "", ""))
