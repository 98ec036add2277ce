"""A certificate authority of one's own, made on the fly, for peers that speak TLS on loopback.

Certificates as strict clients want them (Python 3.13 checks RFC 5280: key usage, key identifiers), good for a day.
"""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = timedelta(days=1)
_PRIVATE_MODE = 0o600


class CertificateFiles(NamedTuple):
    """A certificate and its key, both PEM."""

    cert_file: Path
    key_file: Path


class PrivateCa:
    """Issues certificates into *directory*; who trusts `ca_file` trusts them all."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "private CA of a test")])
        usage = _usage(is_authority=True)
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = directory / "ca.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, addresses: tuple[str, ...] = ("127.0.0.1", "::1")) -> CertificateFiles:
        """Return a new certificate for *name* and *addresses*, good for servers and for clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), *(x509.IPAddress(ip_address(address)) for address in addresses)]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = CertificateFiles(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        files.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key_file.touch(mode=_PRIVATE_MODE)
        files.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def server_context(self, name: str = "localhost", *, wants_client: object = None) -> ssl.SSLContext:
        """Return what a server shows a certificate for *name* with; *wants_client*, if true, demands one of its own."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self.issue(name))
        if wants_client:
            context.load_verify_locations(self.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(timezone.utc)
        return (
            x509.CertificateBuilder(self._name, name, key, x509.random_serial_number(), now - _DAY, now + _DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
