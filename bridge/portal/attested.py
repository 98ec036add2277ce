"""An attested document, as an agent shows it: which VM it speaks of, or why it counts for none.

The document is PKCS#7 over a JSON object with vmId, subscriptionId, nonce and times, signed by Azure. The checks run in
the order of `DocumentRefusal`, and the first that fails is named. Two published holes of others are why the order
matters: a signature that nobody verified, and the first certificate in the bag taken for the signer's. Here the
signer's certificate is the one that the signature names, the signature is checked with its key, and *that* certificate
must lead to a root that the portal trusts.

Documents seen in the wild (2022, 2023): no signed attributes; DigestAlgorithm says sha256WithRSAEncryption where
sha256 is meant; the certificate of the intermediate authority is not in the bag (`bridge.portal.intermediates`). With
signed attributes, which RFC 5652 allows too, these are what is signed, and they must name the content's digest.

Everything before the chain is a stranger's bytes: no message quotes them, nothing of them is kept, and a document that
is refused has cost some milliseconds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, NamedTuple

from asn1crypto import cms
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509 import verification

from bridge import strict_json
from bridge.clock import Clock
from bridge.errors import BridgeError
from bridge.portal.intermediates import Intermediates
from bridge.portal.tokens import Challenges, Nonce, UsedNonces
from bridge.system.access_tokens import DocumentRefusal

#: Real ones have 4,000 to 9,000.
MAX_DOCUMENT_CHARACTERS = 32 * 1024
MAX_AGE_SECONDS = 300
_SKEW_SECONDS = 60
#: The signer's, and what may lead to a root: of many that name one another the ways would be too many to try.
_MOST_CERTIFICATES = 5
_RSA_BITS = range(2048, 4097)

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)?metadata\.azure\.(?:com|us|cn)")
_WRITTEN = "%m/%d/%y %H:%M:%S %z"
_MOST_TIME_CHARACTERS = 32

#: What a DigestAlgorithm may say; of real documents it is the signature's algorithm instead.
_DIGESTS: dict[str, tuple[str, type[hashes.HashAlgorithm]]] = {
    "2.16.840.1.101.3.4.2.1": ("sha256", hashes.SHA256),
    "2.16.840.1.101.3.4.2.2": ("sha384", hashes.SHA384),
    "2.16.840.1.101.3.4.2.3": ("sha512", hashes.SHA512),
    "1.2.840.113549.1.1.11": ("sha256", hashes.SHA256),
    "1.2.840.113549.1.1.12": ("sha384", hashes.SHA384),
    "1.2.840.113549.1.1.13": ("sha512", hashes.SHA512),
}
_SET_OF = b"\x31"


class DocumentRefused(BridgeError):
    """The document counts for no VM, for *reason*; the message holds nothing of it."""

    def __init__(self, reason: DocumentRefusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class AttestedVm(NamedTuple):
    """The VM that a document speaks of; both in lower case."""

    vm_id: str
    subscription_id: str


class _Signed(NamedTuple):
    """One SignedData with one signer, taken apart; nothing of it is verified."""

    content: bytes
    content_type: str
    signer: Any
    bag: tuple[tuple[bytes, x509.Certificate], ...]
    """Each certificate with the name of its issuer, DER."""


class DocumentVerifier:
    """Says which VM a document speaks of, for documents of *subscriptions* that lead to *roots*.

    *nonce*: "required" takes a document with a fresh challenge of *challenges* in it alone, and each once (*used*);
    "preferred" also one with another nonce, for a metadata service that gives documents of earlier requests: then
    whoever has seen a document can show it too, for five minutes. Safe to use from many threads.
    """

    def __init__(
        self,
        *,
        roots: Sequence[x509.Certificate],
        subscriptions: Collection[str],
        challenges: Challenges,
        used: UsedNonces,
        intermediates: Intermediates,
        clock: Clock,
        nonce: Literal["required", "preferred"] = "required",
    ) -> None:
        self._store = verification.Store(list(roots))
        self._subscriptions = frozenset(each.lower() for each in subscriptions)
        self._challenges = challenges
        self._used = used
        self._clock = clock
        self._nonce = nonce
        self._intermediates = intermediates

    def vm_of(self, document: str) -> AttestedVm:
        """Return the VM that *document*, in base64, speaks of; raise DocumentRefused when it counts for none."""
        signed = _taken_apart(document)
        signer = _signer(signed)
        _check_signature(signed, signer)
        self._check_chain(signer, _name_of(signer), [each for _, each in signed.bag])
        said = _said(signed.content)
        subscription_id = said["subscriptionId"].lower()
        is_fresh = self._check_nonce(said["nonce"])
        self._check_times(said["timeStamp"])
        if subscription_id not in self._subscriptions:
            raise DocumentRefused(
                DocumentRefusal.SUBSCRIPTION_NOT_LISTED, "Its subscription is none of those that are listed."
            )
        vm_id = _vm_id(said["vmId"])
        # Last, since what is remembered is what counts: a document that is refused leaves nothing behind.
        if is_fresh and self._nonce == "required" and not self._used.take(vm_id, said["nonce"]):
            raise DocumentRefused(DocumentRefusal.REPLAYED, "It was shown before.")
        return AttestedVm(vm_id, subscription_id)

    def _check_chain(self, signer: x509.Certificate, name: str, beside: Sequence[x509.Certificate]) -> None:
        policy = verification.PolicyBuilder().store(self._store).time(self._clock.now())
        verifier = policy.build_server_verifier(x509.DNSName(name))
        others = [each for each in beside if each != signer]
        _check_usage(signer)
        try:
            verifier.verify(signer, [*others, *self._intermediates.at_hand()])
        except Exception:  # noqa: BLE001  # not VerificationError alone: a subject that cannot be read is another
            try:
                self._intermediates.fetch_for(signer, others)
                verifier.verify(signer, [*others, *self._intermediates.at_hand()])
            except Exception as error:
                raise DocumentRefused(
                    DocumentRefusal.UNTRUSTED, "Its signer's certificate leads to no root that is trusted here."
                ) from error

    def _check_nonce(self, nonce: str) -> bool:
        """Return whether *nonce* is fresh; raise DocumentRefused when it must be."""
        found = self._challenges.look_at(nonce)
        if found is not Nonce.FRESH and self._nonce == "required":
            what = "an old challenge" if found is Nonce.OLD else "no challenge of this portal"
            raise DocumentRefused(DocumentRefusal.OLD_NONCE, f"Its nonce is {what}.")
        return found is Nonce.FRESH

    def _check_times(self, times: dict[str, Any]) -> None:
        now = self._clock.now()
        created_at, expires_at = _moment(times.get("createdOn")), _moment(times.get("expiresOn"))
        if created_at > now + timedelta(seconds=_SKEW_SECONDS):
            raise DocumentRefused(DocumentRefusal.NOT_YET_VALID, "It is of a time that is not yet; look at the clocks.")
        if now - created_at > timedelta(seconds=MAX_AGE_SECONDS) or now >= expires_at:
            raise DocumentRefused(DocumentRefusal.TOO_OLD, f"It is more than {MAX_AGE_SECONDS} s old, or has expired.")


def _taken_apart(document: str) -> _Signed:
    """Return the parts of *document*; raise DocumentRefused when it is no SignedData with one signer."""
    if len(document) > MAX_DOCUMENT_CHARACTERS:
        raise DocumentRefused(DocumentRefusal.TOO_LARGE, f"It has more than {MAX_DOCUMENT_CHARACTERS} characters.")
    try:
        der = base64.b64decode(document, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DocumentRefused(DocumentRefusal.MALFORMED, "It is no base64.") from error
    try:
        return _parsed(der)
    except DocumentRefused:
        raise
    except Exception as error:  # of a stranger's bytes the parsers raise whatever they please
        raise DocumentRefused(DocumentRefusal.MALFORMED, "It is no PKCS#7 SignedData with a content.") from error


def _parsed(der: bytes) -> _Signed:
    outer = cms.ContentInfo.load(der, strict=True)
    if outer["content_type"].native != "signed_data":
        raise ValueError
    data = outer["content"]
    signers = data["signer_infos"]
    if len(signers) != 1:
        raise DocumentRefused(DocumentRefusal.NOT_ONE_SIGNER, f"It has {len(signers)} signers, not one.")
    if len(data["certificates"]) > _MOST_CERTIFICATES:
        raise ValueError
    inner = data["encap_content_info"]
    content = bytes(inner["content"])
    if not content:
        raise ValueError
    bag = tuple(
        (each.chosen["tbs_certificate"]["issuer"].dump(), x509.load_der_x509_certificate(each.chosen.dump()))
        for each in data["certificates"]
        if each.name == "certificate"
    )
    return _Signed(content, inner["content_type"].dotted, signers[0], bag)


def _signer(signed: _Signed) -> x509.Certificate:
    """Return the one certificate that the signature names by its issuer and serial, wherever it is in the bag."""
    try:
        named = signed.signer["sid"].chosen
        issuer, serial = named["issuer"].dump(), named["serial_number"].native
        found = [each for its_issuer, each in signed.bag if (its_issuer, each.serial_number) == (issuer, serial)]
    except Exception as error:  # likewise; it may be named by the identifier of its key, too
        raise DocumentRefused(DocumentRefusal.MALFORMED, "Its signer is not named by issuer and serial.") from error
    if len(found) != 1:
        raise DocumentRefused(DocumentRefusal.UNKNOWN_SIGNER, "The certificate of its signer is not in it, once.")
    return found[0]


def _check_signature(signed: _Signed, certificate: x509.Certificate) -> None:
    """Raise DocumentRefused unless the content is what the key of *certificate* signed."""
    try:
        digest, algorithm = _DIGESTS[signed.signer["digest_algorithm"]["algorithm"].dotted]
        message = _message(signed, digest)
        signature = signed.signer["signature"].native
        key = certificate.public_key()
    except DocumentRefused:
        raise
    except Exception as error:  # likewise
        raise DocumentRefused(DocumentRefusal.MALFORMED, "Its signature is of no kind that is known.") from error
    try:
        if isinstance(key, rsa.RSAPublicKey) and key.key_size in _RSA_BITS:
            key.verify(signature, message, padding.PKCS1v15(), algorithm())
            return
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, message, ec.ECDSA(algorithm()))
            return
    except (InvalidSignature, UnsupportedAlgorithm, ValueError) as error:
        raise DocumentRefused(DocumentRefusal.FORGED, "Its signature is not its signer's.") from error
    raise DocumentRefused(DocumentRefusal.MALFORMED, "Its signer's key is of no kind that is known.")


def _message(signed: _Signed, digest: str) -> bytes:
    """Return what is signed: the content, or the attributes that hold its digest (RFC 5652, section 5.4)."""
    attributes = signed.signer["signed_attrs"]
    if not attributes or not len(attributes):
        if signed.content_type != cms.ContentType.unmap("data"):
            raise ValueError  # section 5.3: without attributes it is plain data
        return signed.content
    values = {}
    for attribute in attributes:
        name = attribute["type"].dotted
        if name in values or len(attribute["values"]) != 1:
            raise ValueError
        values[name] = attribute["values"][0]
    if values[cms.CMSAttributeType.unmap("content_type")].dotted != signed.content_type:
        raise ValueError
    stated = values[cms.CMSAttributeType.unmap("message_digest")].native
    if not hmac.compare_digest(stated, hashlib.new(digest, signed.content).digest()):
        raise DocumentRefused(DocumentRefusal.TAMPERED, "Its content is not what was signed.")
    encoded: bytes = attributes.dump()
    return _SET_OF + encoded[1:]  # signed as a SET OF, and not under the tag that it stands under


def _check_usage(certificate: x509.Certificate) -> None:
    """Raise DocumentRefused for a key that is not for signatures (RFC 5280, section 4.2.1.3)."""
    try:
        uses = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not (uses.digital_signature or uses.content_commitment):
        raise DocumentRefused(DocumentRefusal.UNTRUSTED, "Its signer's certificate is not for signatures.")


def _name_of(certificate: x509.Certificate) -> str:
    """Return the name of a metadata service that *certificate* is for; raise DocumentRefused when there is none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = [name for name in names.get_values_for_type(x509.DNSName) if _NAME.fullmatch(name.lower())]
    except Exception as error:  # of a stranger's certificate; all of its extensions are read at once
        raise DocumentRefused(DocumentRefusal.WRONG_NAME, "Its signer's certificate is for no name.") from error
    if not found:
        raise DocumentRefused(
            DocumentRefusal.WRONG_NAME,
            "Its signer's certificate is not for metadata.azure.com or a region's name of it.",
        )
    return found[0]


def _said(content: bytes) -> dict[str, Any]:
    """Return what *content*, which Azure has signed, says; its members are of the types that are needed."""
    try:
        said = strict_json.loads(content.decode("utf-8"))
        texts = [said[name] for name in ("nonce", "subscriptionId", "vmId")]
        if all(isinstance(text, str) for text in texts) and isinstance(said["timeStamp"], dict):
            return said  # type: ignore[no-any-return]
    except (ValueError, LookupError, TypeError):
        pass
    raise DocumentRefused(DocumentRefusal.MALFORMED, "Its content is not what Azure's documents hold.")


def _moment(text: object) -> datetime:
    if isinstance(text, str) and len(text) <= _MOST_TIME_CHARACTERS:
        try:
            return datetime.strptime(text, _WRITTEN).astimezone(timezone.utc)
        except (ValueError, OverflowError):
            pass
    raise DocumentRefused(DocumentRefusal.MALFORMED, "Its times are not as Azure writes them.")


def _vm_id(text: str) -> str:
    if _UUID.fullmatch(text) is None:
        raise DocumentRefused(DocumentRefusal.NO_VM_ID, "Its vmId is no UUID.")
    return text.lower()
