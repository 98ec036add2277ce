"""Signs the simulator's attested documents in the same way as Azure's metadata service.

As in Azure, a document is a JSON object in a PKCS#7 SignedData structure without signed attributes. It includes the
signer's certificate but not the intermediate certificate. The signer's names (SAN) are `metadata.azure.com` and a
subdomain for the region. Microsoft's page "Azure Instance Metadata Service" describes the format.

To test a portal with these documents, configure the portal to trust the certificate from `root_pem`. Never trust this
certificate in production, because anyone who can connect to the simulator can get a document for any VM.

The simulator imports this module only when a document is requested, because the import takes 0.1 s.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, pkcs7
from cryptography.x509.oid import AuthorityInformationAccessOID, ExtendedKeyUsageOID, NameOID

from bridge.testing.simulator.machines import Machine

#: The path of the intermediate certificate on the simulator.
INTERMEDIATE_PATH = "/control/attestation/intermediate"

_VALID_SECONDS = 6 * 3600
_SAN = "metadata.azure.com"
_YEAR = timedelta(days=365)


_Signer = tuple[x509.Certificate, rsa.RSAPrivateKey]


class AttestationAuthority:
    """Signs the documents of all machines in one simulator. The class is thread-safe.

    *now* returns the creation time of a new document. Every signer's certificate contains the URL of the intermediate
    certificate, which *intermediate_url* returns.
    """

    def __init__(self, *, now: Callable[[], datetime], intermediate_url: Callable[[], str]) -> None:
        self._now = now
        self._intermediate_url = intermediate_url
        self._lock = threading.Lock()
        root, self._intermediate, self._intermediate_key = _new_chain(now())
        self.root_pem = root.public_bytes(Encoding.PEM)
        """The root certificate, which a portal must trust."""
        self.intermediate_pem = self._intermediate.public_bytes(Encoding.PEM)
        self._signers: dict[str, _Signer] = {}
        self._last: dict[str, str] = {}

    def document(self, machine: Machine, nonce: str, *, kind: str | None = None) -> str:
        """Return the document of *machine* with *nonce* in base64.

        *kind* is a fault to add to the document.
        """
        with self._lock:
            if kind == "cached_nonce":
                return self._last.get(machine.vm_id) or self._signed(machine, "")
            made = self._signed(machine, nonce, kind=kind)
            if kind is None:
                self._last[machine.vm_id] = made
            return made

    def _signed(self, machine: Machine, nonce: str, *, kind: str | None = None) -> str:
        signer = self._signers.get(machine.location)
        if signer is None:
            signer = self._signers[machine.location] = self._issue(machine.location)
        now = self._now()
        der = _pkcs7(_content(machine, nonce or f"{now:%Y%m%d-%H%M%S}", now), signer)
        if kind == "tampered":
            digit = "1" if machine.vm_id.startswith("0") else "0"
            der = der.replace(machine.vm_id.encode(), (digit + machine.vm_id[1:]).encode())
        return base64.b64encode(der).decode()

    def _issue(self, location: str) -> _Signer:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        names = [x509.DNSName(_SAN), x509.DNSName(f"{location}.{_SAN}")]
        where = x509.UniformResourceIdentifier(self._intermediate_url())
        builder = _builder(_SAN, self._intermediate.subject, key.public_key(), self._now(), is_authority=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        builder = builder.add_extension(
            x509.AuthorityInformationAccess([x509.AccessDescription(AuthorityInformationAccessOID.CA_ISSUERS, where)]),
            critical=False,
        )
        return _issued(builder, self._intermediate_key), key


def _content(machine: Machine, nonce: str, created_at: datetime) -> bytes:
    expires_at = created_at + timedelta(seconds=_VALID_SECONDS)
    content = {
        "licenseType": "",
        "nonce": nonce,
        "plan": {"name": "", "product": "", "publisher": ""},
        "sku": machine.compute()["sku"],
        "subscriptionId": machine.subscription_id,
        "timeStamp": {"createdOn": _written(created_at), "expiresOn": _written(expires_at)},
        "vmId": machine.vm_id,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _written(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%m/%d/%y %H:%M:%S} -0000"


def _pkcs7(content: bytes, signer: _Signer) -> bytes:
    builder = pkcs7.PKCS7SignatureBuilder().set_data(content)
    builder = builder.add_signer(*signer, hashes.SHA256())
    return builder.sign(Encoding.DER, [pkcs7.PKCS7Options.Binary, pkcs7.PKCS7Options.NoAttributes])


def _new_chain(now: datetime) -> tuple[x509.Certificate, x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return a root certificate, an intermediate certificate, and the key of the latter."""
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root_name = "Simulated Root"
    subject = _name(root_name)
    root = _builder(root_name, subject, root_key.public_key(), now, is_authority=True)
    below = _builder("Simulated Issuing CA 01", subject, key.public_key(), now, is_authority=True)
    return _issued(root, root_key), _issued(below, root_key), key


def _builder(name: str, issuer: x509.Name, key: Any, now: datetime, *, is_authority: bool) -> x509.CertificateBuilder:
    uses = dict.fromkeys(
        ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _YEAR)
        .not_valid_after(now + 5 * _YEAR)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                key_encipherment=not is_authority,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                **uses,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _issued(builder: x509.CertificateBuilder, issuer_key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return builder.add_extension(identifier, critical=False).sign(issuer_key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
