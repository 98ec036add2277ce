"""Crafted attested documents: the portal rejects each of them without an internal error."""

import pytest
from asn1crypto import cms
from azure_documents import SUBSCRIPTION_ID, Authority, said
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID
from verifier_kit import NAME, NOW, VerifierKit, with_bag

from bridge.portal.attested import MAX_DOCUMENT_CHARACTERS
from bridge.system.access_tokens import DocumentRefusal

SHA256 = bytes.fromhex("0609608648016503040201")
SHA1 = bytes.fromhex("06052b0e03021a")
MD5 = bytes.fromhex("06082a864886f70d0205")


def changed(der, change):
    """Return the document after *change* of its SignedData."""
    outer = cms.ContentInfo.load(der)
    change(outer["content"])
    return outer.dump(force=True)


# Signers.


def test_two_signers_are_rejected_in_either_order_even_if_identical(verifier, azure, stranger):
    content = verifier.content()
    mine = cms.ContentInfo.load(azure.document(content, azure.signer(NAME)))["content"]["signer_infos"][0]
    his = cms.ContentInfo.load(stranger.document(content, stranger.signer(NAME)))["content"]["signer_infos"][0]
    for signers in ([mine, his], [his, mine], [mine, mine], []):
        der = changed(azure.document(content, azure.signer(NAME)), lambda data, signers=signers: _sign(data, signers))
        assert verifier.refusal(der) is DocumentRefusal.NOT_ONE_SIGNER


def _sign(data, signers):
    data["signer_infos"] = cms.SignerInfos(signers)


def test_signer_identified_by_its_key_is_malformed(verifier):
    def by_key(data):
        data["signer_infos"][0]["version"] = "v3"
        data["signer_infos"][0]["sid"] = cms.SignerIdentifier(name="subject_key_identifier", value=b"0" * 20)

    assert verifier.refusal(changed(verifier.document(), by_key)) is DocumentRefusal.MALFORMED


def test_signature_is_not_valid_for_another_content(verifier):
    """Signed attributes cannot be replayed as content, and signed content cannot be replayed as attributes."""
    plain, other = verifier.document(), verifier.document(attributes=True)
    attributes = cms.ContentInfo.load(other)["content"]["signer_infos"][0]["signed_attrs"]
    signature = cms.ContentInfo.load(other)["content"]["signer_infos"][0]["signature"]
    as_content = b"\x31" + attributes.dump()[1:]

    def attributes_as_content(data):
        data["encap_content_info"] = {"content_type": "data", "content": as_content}
        data["signer_infos"][0]["signature"] = signature

    def attributes_added(data):
        data["signer_infos"][0]["signed_attrs"] = attributes

    def attributes_gone(data):
        data["signer_infos"][0]["signed_attrs"] = None

    assert verifier.refusal(changed(plain, attributes_as_content)) in {
        DocumentRefusal.MALFORMED,
        DocumentRefusal.FORGED,
    }
    assert verifier.refusal(changed(plain, attributes_added)) in {DocumentRefusal.TAMPERED, DocumentRefusal.FORGED}
    assert verifier.refusal(changed(other, attributes_gone)) is DocumentRefusal.FORGED


@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "attributes"])
@pytest.mark.parametrize("kind", ["signed_data", "1.3.6.1.4.1.311.2.1.4"])  # the second type also contains bytes
def test_content_of_another_type_is_malformed(verifier, kind, attributes):
    """The signature is valid in each case: RFC 5652, sections 5.3 and 11.1."""

    def other_type(data):
        data["encap_content_info"]["content_type"] = kind

    assert verifier.refusal(changed(verifier.document(attributes=attributes), other_type)) is DocumentRefusal.MALFORMED


@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "attributes"])
@pytest.mark.parametrize("digest", [SHA1, MD5], ids=["sha1", "md5"])
def test_weak_digest_algorithm_is_malformed(verifier, digest, attributes):
    """Even if the signature is valid for the digest."""
    oid = {SHA1: "sha1", MD5: "md5"}[digest]
    key = verifier.azure.key

    def weak(data):
        info = data["signer_infos"][0]
        info["digest_algorithm"] = {"algorithm": oid}
        signed = bytes(data["encap_content_info"]["content"])
        if digest == SHA1:
            info["signature"] = key.sign(signed, padding.PKCS1v15(), hashes.SHA1())

    assert verifier.refusal(changed(verifier.document(attributes=attributes), weak)) is DocumentRefusal.MALFORMED


def test_signature_with_another_padding_is_forged(verifier):
    def pss(data):
        signed = bytes(data["encap_content_info"]["content"])
        way = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
        data["signer_infos"][0]["signature"] = verifier.azure.key.sign(signed, way, hashes.SHA256())

    assert verifier.refusal(changed(verifier.document(), pss)) is DocumentRefusal.FORGED


@pytest.mark.parametrize("signature", [b"", b"\0", b"\0" * 256, b"\xff" * 256, b"0" * 5_000])
def test_invalid_signature_bytes_are_forged(verifier, signature):
    for desk_of in (verifier, VerifierKit(Authority(NOW, key=ec.generate_private_key(ec.SECP256R1())))):

        def none(data):
            data["signer_infos"][0]["signature"] = signature

        assert desk_of.refusal(changed(desk_of.document(), none)) is DocumentRefusal.FORGED


# The certificate chain.


@pytest.mark.parametrize("uses", [("key_encipherment",), ("crl_sign",), ("data_encipherment", "key_agreement")])
def test_certificate_without_a_signature_key_usage_is_not_trusted(verifier, uses):
    key_usage = tuple(uses)
    if "key_agreement" not in uses:
        assert verifier.accepts(verifier.document(key_usage=(*key_usage, "digital_signature")))
    assert verifier.refusal(verifier.document(key_usage=key_usage)) is DocumentRefusal.UNTRUSTED


def test_content_commitment_key_usage_is_accepted(verifier):
    assert verifier.accepts(verifier.document(key_usage=("content_commitment",)))


@pytest.mark.parametrize(
    "issuer",
    [
        {"is_authority": False},
        {"is_authority": True, "key_usage": ("digital_signature", "crl_sign")},
        {"is_authority": True, "more": (x509.NameConstraints([x509.DNSName("example.net")], None),)},
        {"is_authority": True, "more": (x509.NameConstraints(None, [x509.DNSName("azure.com")]),)},
        {"is_authority": True, "more": (x509.NameConstraints(None, [x509.DNSName(NAME)]),)},
        {"is_authority": True, "valid": (-5 * (NOW - NOW.replace(day=1)), -(NOW - NOW.replace(day=5)))},
        {"is_authority": True, "more": (x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00"),)},
    ],
    ids=["no CA", "no key_cert_sign", "permitted", "excluded", "excluded name", "expired", "unknown critical"],
)
def test_issuer_without_permission_is_not_trusted(azure, issuer):
    right, wrong = azure.below(is_authority=True), azure.below(**issuer)
    content = VerifierKit(azure).content()
    assert VerifierKit(azure).accepts(right.document(content, right.signer(NAME), right.intermediate))
    der = wrong.document(content, wrong.signer(NAME), wrong.intermediate)
    assert VerifierKit(azure).refusal(der) is DocumentRefusal.UNTRUSTED


def test_path_length_of_an_intermediate_is_enforced():
    azure = Authority(NOW, path_length=0)
    verifier = VerifierKit(azure)
    below = azure.below(is_authority=True)
    assert verifier.refusal(below.document(verifier.content(), below.signer(NAME), below.intermediate)) is (
        DocumentRefusal.UNTRUSTED
    )
    assert verifier.accepts(verifier.document())


def test_circular_certificate_chain_is_not_trusted(verifier, stranger):
    one, two = stranger.below(is_authority=True), stranger.below(is_authority=True)
    der = one.document(verifier.content(), one.signer(NAME), one.intermediate, two.intermediate, stranger.intermediate)
    assert verifier.refusal(der) is DocumentRefusal.UNTRUSTED


# Malformed certificates of attackers, which the portal parses before it has verified the chain.


@pytest.mark.parametrize("name", ["-a.metadata.azure.com", "a-.metadata.azure.com", "-.metadata.azure.com"])
def test_invalid_host_name_in_a_certificate_is_rejected(verifier, stranger, name):
    for authority in (verifier.azure, stranger):
        der = authority.document(verifier.content(), authority.signer(name))
        assert verifier.refusal(der) is DocumentRefusal.WRONG_NAME


ODD_NAMES = {
    "x400": b"\xa3\x00",
    "edi": b"\xa5\x00",
    "other": b"\xa0\x02\x06\x00",
    "address": b"\x87\x03abc",
    "no ascii": b"\x82\x02\xff\xfe",
    "directory": b"\xa4\x02\x31\x00",
    "nul": b"\x82\x18metadata.azure.com\0.x.de",
}


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_certificate_with_an_unreadable_name_is_rejected(verifier, stranger, odd):
    right = b"\x82" + bytes([len(NAME)]) + NAME.encode()
    found = ODD_NAMES[odd] + (right if odd != "nul" else b"")
    extension = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30" + bytes([len(found)]) + found)
    for authority in (verifier.azure, stranger):
        der = authority.document(verifier.content(), authority.signer(more=(extension,)))
        assert verifier.refusal(der) is DocumentRefusal.WRONG_NAME


@pytest.mark.parametrize("value", [b"", b"\xff", b"\x30\x80", b"\x30\x02\xa3\x00", b"\x04\x03abc"])
@pytest.mark.parametrize(
    "extension",
    ["AUTHORITY_INFORMATION_ACCESS", "NAME_CONSTRAINTS", "CERTIFICATE_POLICIES", "POLICY_CONSTRAINTS", "TLS_FEATURE"],
)
def test_certificate_with_an_unreadable_extension_causes_no_error(verifier, stranger, extension, value):
    more = (x509.UnrecognizedExtension(getattr(ExtensionOID, extension), value),)
    der = stranger.document(verifier.content(), stranger.signer(NAME, more=more))
    assert verifier.refusal(der) in {DocumentRefusal.UNTRUSTED, DocumentRefusal.WRONG_NAME, DocumentRefusal.MALFORMED}


def test_certificate_with_an_unreadable_subject_is_rejected(verifier, stranger):
    """The algorithm is also invalid, so that the library formats the subject in its error message."""
    signer = stranger.signer(NAME)
    found = signer.public_bytes(Encoding.DER)
    broken = found.replace(b"metadata.azure", b"metadata.az\x82re", 1).replace(b"\x86H\xce=\x04", b"\x86H1=\x04", 1)
    der = stranger.document(verifier.content(), signer).replace(found, broken)
    assert verifier.refusal(der) is DocumentRefusal.UNTRUSTED


# The content.


@pytest.mark.parametrize(
    "other", [str.upper, str.title, lambda text: text.replace("i", "\u0131").replace("s", "\u017f")]
)
def test_challenge_is_case_sensitive(verifier, other):
    nonce = next(text for text in iter(verifier.challenges.new, "") if other(text) != text)
    assert verifier.refusal(verifier.document(content=said(other(nonce), NOW))) is DocumentRefusal.OLD_NONCE
    assert verifier.accepts(verifier.document(content=said(nonce, NOW)))


@pytest.mark.parametrize("text", [f" {SUBSCRIPTION_ID}", f"{SUBSCRIPTION_ID}\n", "", "*", SUBSCRIPTION_ID[:-1]])
def test_subscription_in_another_format_is_not_listed(verifier, text):
    der = verifier.document(content=verifier.content(subscriptionId=text))
    assert verifier.refusal(der) is DocumentRefusal.SUBSCRIPTION_NOT_LISTED


@pytest.mark.parametrize(
    "text",
    [
        *("05/06/30 07:08:09", "05/06/30 07:08:09 ", "2030-05-06T07:08:09Z", "05/06/2030 07:08:09 -0000"),
        *("1/1/1 -0000", "", "now", "13/45/30 00:00:00 -0000", "0" * 99),
    ],
)
def test_time_without_a_zone_or_in_another_format_is_malformed(verifier, text):
    for name in ("createdOn", "expiresOn"):
        times = {"createdOn": "05/06/30 07:08:09 -0000", "expiresOn": "05/06/30 13:08:09 -0000", name: text}
        der = verifier.document(content=verifier.content(timeStamp=times))
        assert verifier.refusal(der) is DocumentRefusal.MALFORMED


def test_time_zone_of_a_document_is_applied(verifier):
    times = {"createdOn": "05/06/30 07:08:09 +0100", "expiresOn": "05/06/30 13:08:09 -0000"}
    assert verifier.refusal(verifier.document(content=verifier.content(timeStamp=times))) is DocumentRefusal.TOO_OLD
    times["createdOn"] = "05/06/30 07:08:09 -0100"
    assert (
        verifier.refusal(verifier.document(content=verifier.content(timeStamp=times))) is DocumentRefusal.NOT_YET_VALID
    )


@pytest.mark.parametrize("name", ["vmId", "nonce", "subscriptionId"])
def test_duplicate_json_member_is_malformed(verifier, name):
    right = verifier.content()
    for twice in (b'{"%s": "x", ' % name.encode() + right[1:], right[:-1] + b', "%s": "x"}' % name.encode()):
        assert verifier.refusal(verifier.document(content=twice)) is DocumentRefusal.MALFORMED


# Size.


def test_document_size_limit_is_exact(verifier):
    nonce = verifier.challenges.new()
    padded = len(verifier.document(content=said(nonce, NOW, padding="")))
    room = MAX_DOCUMENT_CHARACTERS // 4 * 3 - padded - 64
    assert verifier.accepts(verifier.document(content=said(nonce, NOW, padding="x" * room)))
    too_large = verifier.document(content=said(nonce, NOW, padding="x" * (room + 200)))
    assert verifier.refusal(too_large) is DocumentRefusal.TOO_LARGE


def test_document_with_too_many_certificates_is_malformed(verifier, azure):
    signer = azure.signer(NAME)
    der = azure.document(verifier.content(), signer)
    assert verifier.refusal(with_bag(der, signer, *(azure.signer(NAME) for _ in range(5)))) is DocumentRefusal.MALFORMED
    assert verifier.accepts(with_bag(der, signer, *(azure.signer(NAME) for _ in range(4))))


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256K1()).public_key(),
        ec.generate_private_key(ec.BrainpoolP512R1()).public_key(),
        rsa.RSAPublicNumbers((1 << 2047) + 1, (1 << 2047) + 3).public_key(),
        rsa.RSAPublicNumbers(65537, (1 << 8191) + 1).public_key(),
    ],
    ids=["secp256k1", "brainpool", "exponent", "8,192 bits"],
)
def test_certificate_with_an_expensive_key_is_malformed(verifier, azure, key):
    class Costly:
        def public_key(self):
            return key

    signer = azure.signer(NAME)
    costly = Authority(NOW, key=Costly())
    der = azure.document(verifier.content(), signer)
    assert verifier.refusal(with_bag(der, signer, costly.signer(NAME))) is DocumentRefusal.MALFORMED
