"""Verifies the signed documents that VMs use to prove their identity.

An attested document is a signed JSON object (PKCS#7). It contains the vmId, the subscriptionId, the nonce, the creation
time, and the expiry time. `DocumentRefusal` lists the reasons why the portal can refuse a document.

The verifier checks the signature with the certificate that the signature names, and requires a chain from this
certificate to a trusted root. Without these checks, an attacker could forge a document.

Documents that Azure signed in 2022 and 2023 have neither signed attributes nor an intermediate certificate (see
`certificate_chain`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, cast

import msgspec
from asn1crypto import cms
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509 import verification

from bridge import strict_json
from bridge.clock import Clock
from bridge.errors import BridgeError
from bridge.portal.agent_tokens import Challenges
from bridge.portal.certificate_chain import IntermediateCertificates
from bridge.system.access_tokens import DocumentRefusal

#: Real documents have 4,000 to 9,000 characters.
MAX_DOCUMENT_CHARACTERS = 32 * 1024
MAX_AGE_SECONDS = 300
_SKEW_SECONDS = 60
#: More certificates could form too many chains to check.
_MOST_CERTIFICATES = 5
_RSA_BITS = range(2048, 4097)
#: With a long exponent, verifying a signature takes as long as signing.
_MOST_EXPONENT_BITS = 32
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)?metadata\.azure\.(?:com|us|cn)")
_WRITTEN = "%m/%d/%y %H:%M:%S %z"

#: The accepted values of DigestAlgorithm. In real documents, the value names the signature algorithm instead.
_DIGESTS: dict[str, hashes.HashAlgorithm] = {
    "2.16.840.1.101.3.4.2.1": hashes.SHA256(),
    "2.16.840.1.101.3.4.2.2": hashes.SHA384(),
    "2.16.840.1.101.3.4.2.3": hashes.SHA512(),
    "1.2.840.113549.1.1.11": hashes.SHA256(),
    "1.2.840.113549.1.1.12": hashes.SHA384(),
    "1.2.840.113549.1.1.13": hashes.SHA512(),
}
_SET_OF = b"\x31"


class DocumentRefused(BridgeError):
    """A document is refused for *reason*. Messages never quote the document."""

    def __init__(self, reason: DocumentRefusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Times(msgspec.Struct, frozen=True, rename="camel"):
    created_on: str
    expires_on: str


class _Content(msgspec.Struct, frozen=True, rename="camel"):
    nonce: str
    subscription_id: str
    vm_id: str
    time_stamp: _Times


@dataclass(kw_only=True, eq=False)
class DocumentVerifier:
    """Verifies documents of VMs in *subscriptions*. Threads can share a verifier.

    If *nonce* is "required", a document must contain an unexpired challenge from *challenges*. The verifier accepts
    each document only once: *take_document* returns False if it was called before with the same VM and nonce.

    If *nonce* is "preferred", a document can contain any nonce, because the metadata service might return a document
    from an earlier request. Anyone with a copy of such a document can use it for five minutes.
    """

    roots: Sequence[x509.Certificate]
    subscriptions: Collection[str]
    challenges: Challenges
    take_document: Callable[[str, str], bool]
    intermediates: IntermediateCertificates
    clock: Clock
    nonce: Literal["required", "preferred"] = "required"

    def __post_init__(self) -> None:
        self._store = verification.Store(list(self.roots))
        self._subscriptions = frozenset(each.lower() for each in self.subscriptions)

    def vm_of(self, document: str) -> str:
        """Return the vmId of *document* in lowercase.

        The document is Base64. Raise DocumentRefused if a check fails.
        """
        try:
            content = self._verified(document)
            created_at, expires_at = _moment(content.time_stamp.created_on), _moment(content.time_stamp.expires_on)
        except DocumentRefused:
            raise
        except Exception as error:  # malicious input can cause any exception
            raise DocumentRefused(DocumentRefusal.MALFORMED, "The document is malformed.") from error
        is_required = self.nonce == "required"
        if is_required and not self.challenges.is_fresh(content.nonce):
            raise DocumentRefused(DocumentRefusal.OLD_NONCE, "The nonce is not a recent challenge of this portal.")
        self._check_times(created_at, expires_at)
        vm_id = content.vm_id.lower()
        if content.subscription_id.lower() not in self._subscriptions:
            raise DocumentRefused(DocumentRefusal.SUBSCRIPTION_NOT_LISTED, "The subscription is not listed.")
        if _UUID.fullmatch(content.vm_id) is None:
            raise DocumentRefused(DocumentRefusal.NO_VM_ID, "The vmId is not a UUID.")
        # This check is the last one, because a refused document must not be stored.
        if is_required and not self.take_document(vm_id, content.nonce):
            raise DocumentRefused(DocumentRefusal.REPLAYED, "The document was used before.")
        return vm_id

    def _verified(self, document: str) -> _Content:
        """Return the content of *document* after the checks of its signature and its certificates."""
        data = _signed_data(document)
        certificates = _certificates(data)
        signer = _signer(data)
        _check_signature(data, signer)
        self._check_chain(signer, _name_of(signer), certificates)
        return msgspec.convert(strict_json.loads(_content_of(data).decode("utf-8")), _Content)

    def _check_chain(self, signer: x509.Certificate, name: str, others: Sequence[x509.Certificate]) -> None:
        policy = verification.PolicyBuilder().store(self._store).time(self.clock.now())
        verifier = policy.build_server_verifier(x509.DNSName(name))
        others = [each for each in others if each != signer]
        _check_usage(signer)
        try:
            verifier.verify(signer, [*others, *self.intermediates.available()])
        except Exception:  # noqa: BLE001  # an unreadable subject raises another error
            try:
                self.intermediates.fetch_for(signer)
                verifier.verify(signer, [*others, *self.intermediates.available()])
            except Exception as error:
                why = "The signer's certificate has no chain to a trusted root."
                raise DocumentRefused(DocumentRefusal.UNTRUSTED, why) from error

    def _check_times(self, created_at: datetime, expires_at: datetime) -> None:
        now = self.clock.now()
        if created_at > now + timedelta(seconds=_SKEW_SECONDS):
            raise DocumentRefused(DocumentRefusal.NOT_YET_VALID, "The document is from the future. Check the clocks.")
        if now - created_at > timedelta(seconds=MAX_AGE_SECONDS) or now >= expires_at:
            message = f"The document is more than {MAX_AGE_SECONDS} s old, or has expired."
            raise DocumentRefused(DocumentRefusal.TOO_OLD, message)


def _signed_data(document: str) -> Any:
    if len(document) > MAX_DOCUMENT_CHARACTERS:
        message = f"The document has more than {MAX_DOCUMENT_CHARACTERS} characters."
        raise DocumentRefused(DocumentRefusal.TOO_LARGE, message)
    outer = cms.ContentInfo.load(base64.b64decode(document, validate=True), strict=True)
    if outer["content_type"].native != "signed_data":
        raise ValueError
    data = outer["content"]
    signers = len(data["signer_infos"])
    if signers != 1:
        raise DocumentRefused(DocumentRefusal.NOT_ONE_SIGNER, f"The document has {signers} signers, not one.")
    if not _content_of(data):
        raise ValueError
    return data


def _content_of(data: Any) -> bytes:
    return bytes(data["encap_content_info"]["content"])


def _certificates(data: Any) -> list[x509.Certificate]:
    if len(data["certificates"]) > _MOST_CERTIFICATES:
        raise ValueError
    certificates = [x509.load_der_x509_certificate(each.chosen.dump()) for each in data["certificates"]]
    for each in certificates:
        _check_cost(each.public_key())
    return certificates


def _signer(data: Any) -> x509.Certificate:
    named = data["signer_infos"][0]["sid"].chosen
    name = named["issuer"].dump(), named["serial_number"].native
    bag = [each.chosen for each in data["certificates"]]
    found = [each for each in bag if (each.issuer.dump(), each.serial_number) == name]
    if len(found) != 1:
        raise DocumentRefused(DocumentRefusal.UNKNOWN_SIGNER, "The document must contain its signer exactly once.")
    return x509.load_der_x509_certificate(found[0].dump())


def _check_signature(data: Any, certificate: x509.Certificate) -> None:
    signer = data["signer_infos"][0]
    algorithm = _DIGESTS[signer["digest_algorithm"]["algorithm"].dotted]
    message, signature, key = _message(data, algorithm), signer["signature"].native, certificate.public_key()
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, message, padding.PKCS1v15(), algorithm)
        else:  # _check_cost permits no other type
            cast("ec.EllipticCurvePublicKey", key).verify(signature, message, ec.ECDSA(algorithm))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError) as error:
        raise DocumentRefused(DocumentRefusal.FORGED, "The signature is invalid.") from error


def _check_cost(key: object) -> None:
    """Raise DocumentRefused if verifying a signature with *key* could take over 50 ms."""
    if isinstance(key, rsa.RSAPublicKey):
        is_cheap = key.key_size in _RSA_BITS and key.public_numbers().e.bit_length() <= _MOST_EXPONENT_BITS
    else:
        is_cheap = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES)
    if not is_cheap:
        raise DocumentRefused(DocumentRefusal.MALFORMED, "The type of a certificate's key is not supported.")


def _message(data: Any, algorithm: hashes.HashAlgorithm) -> bytes:
    """Return the signed bytes: the content or the signed attributes (RFC 5652, 5.4)."""
    content_type, content = data["encap_content_info"]["content_type"].native, _content_of(data)
    attributes = data["signer_infos"][0]["signed_attrs"]
    if not attributes or not len(attributes):
        if content_type != "data":
            raise ValueError  # section 5.3: without attributes, the content is plain data
        return content
    values = {}
    for attribute in attributes:
        name = attribute["type"].native
        if name in values or len(attribute["values"]) != 1:
            raise ValueError
        values[name] = attribute["values"][0].native
    if values["content_type"] != content_type:
        raise ValueError
    if values["message_digest"] != hashlib.new(algorithm.name, content).digest():
        raise DocumentRefused(DocumentRefusal.TAMPERED, "The content differs from the signed content.")
    encoded: bytes = attributes.dump()
    return _SET_OF + encoded[1:]  # the signature covers a SET OF, not the tag of the attributes


def _check_usage(certificate: x509.Certificate) -> None:
    """Raise DocumentRefused unless the certificate permits signatures (RFC 5280, 4.2.1.3)."""
    try:
        uses = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not (uses.digital_signature or uses.content_commitment):
        raise DocumentRefused(DocumentRefusal.UNTRUSTED, "The signer's certificate does not permit signatures.")


def _name_of(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return next(name for name in names.get_values_for_type(x509.DNSName) if _NAME.fullmatch(name.lower()))
    except Exception as error:  # reading one extension parses all of them
        why = "The signer's certificate is not for metadata.azure.com or its regional names."
        raise DocumentRefused(DocumentRefusal.WRONG_NAME, why) from error


def _moment(text: str) -> datetime:
    return datetime.strptime(text, _WRITTEN).astimezone(timezone.utc)
