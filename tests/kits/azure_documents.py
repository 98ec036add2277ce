"""Attested documents for the portal's tests, including documents that the simulator does not create."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, pkcs7
from cryptography.x509.oid import AuthorityInformationAccessOID, ExtendedKeyUsageOID, NameOID

YEAR = timedelta(days=365)
VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
SUBSCRIPTION_ID = "8d10da13-8125-4ba9-a717-bf7490507b3d"


def said(nonce: str, now: datetime, /, **changes: Any) -> bytes:
    """Return the content of a document issued at *now*, with *changes*. None removes a member."""
    content = {
        "nonce": nonce,
        "subscriptionId": SUBSCRIPTION_ID,
        "timeStamp": {"createdOn": written(now), "expiresOn": written(now + timedelta(hours=6))},
        "vmId": VM_ID,
        **changes,
    }
    return json.dumps({name: value for name, value in content.items() if value is not None}).encode()


def written(moment: datetime) -> str:
    """Return *moment* as Azure writes it."""
    return f"{moment.astimezone(timezone.utc):%m/%d/%y %H:%M:%S} -0000"


_KEY_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


class Authority:
    """A root, its intermediate, and the signers of the intermediate, with configurable certificates.

    *path_length* is the path length constraint of the intermediate.
    """

    def __init__(self, now: datetime, *, name: str = "Root", key: Any = None, path_length: int | None = None) -> None:
        self.now = now
        self._root_key = ec.generate_private_key(ec.SECP256R1())
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.root = self._issued(name, name, self._root_key, self._root_key, is_authority=True)
        self.intermediate = self._issued(
            f"{name} CA", name, self._key, self._root_key, is_authority=True, path_length=path_length
        )
        self.key = key or rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def below(self, **more: Any) -> Authority:
        """Return an authority below the intermediate, with the certificate options *more*."""
        found = Authority(self.now, name=f"{self._name} CA", key=self.key)
        found.root = self.intermediate
        found.intermediate = found._issued(f"{self._name} CA CA", f"{self._name} CA", found._key, self._key, **more)
        return found

    def signer(self, *names: str, at: str | None = None, **more: Any) -> x509.Certificate:
        """Return a certificate of `key` for *names* whose issuer certificate is at the URL *at*."""
        return self._issued(
            names[0] if names else "nobody", f"{self._name} CA", self.key, self._key, names=names, at=at, **more
        )

    @property
    def _name(self) -> str:
        return str(self.root.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    def _issued(
        self,
        subject: str,
        issuer: str,
        key: Any,
        issuer_key: Any,
        *,
        is_authority: bool = False,
        names: tuple[str, ...] = (),
        at: str | None = None,
        valid: tuple[timedelta, timedelta] = (-YEAR, 5 * YEAR),
        serial: int | None = None,
        usage: Any = ExtendedKeyUsageOID.SERVER_AUTH,
        key_usage: tuple[str, ...] | None = None,
        path_length: int | None = None,
        more: tuple[x509.ExtensionType, ...] = (),
    ) -> x509.Certificate:
        if key_usage is None:
            key_usage = ("key_cert_sign", "crl_sign") if is_authority else ("digital_signature",)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(issuer))
            .public_key(key.public_key())
            .serial_number(serial or x509.random_serial_number())
            .not_valid_before(self.now + valid[0])
            .not_valid_after(self.now + valid[1])
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=path_length), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .add_extension(x509.KeyUsage(**{use: use in key_usage for use in _KEY_USES}), critical=True)
        )
        for each in more:
            builder = builder.add_extension(each, critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, names)]), critical=False)
        if not is_authority:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if at is not None:
            where = x509.AccessDescription(AuthorityInformationAccessOID.CA_ISSUERS, x509.UniformResourceIdentifier(at))
            builder = builder.add_extension(x509.AuthorityInformationAccess([where]), critical=False)
        return builder.sign(issuer_key, hashes.SHA256())

    def document(
        self,
        content: bytes,
        signer: x509.Certificate,
        *others: x509.Certificate,
        attributes: bool = False,
        key: Any = None,
        digest: Any = None,
    ) -> bytes:
        """Return the SignedData (DER) of *content*, signed by *signer*. It also contains *others*."""
        builder = pkcs7.PKCS7SignatureBuilder().set_data(content)
        builder = builder.add_signer(signer, key or self.key, digest or hashes.SHA256())
        for each in others:
            builder = builder.add_certificate(each)
        options = [pkcs7.PKCS7Options.Binary]
        return builder.sign(Encoding.DER, options if attributes else [*options, pkcs7.PKCS7Options.NoAttributes])


def base64_of(der: bytes) -> str:
    """Return *der* in the encoding of the metadata service."""
    return base64.b64encode(der).decode()


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
