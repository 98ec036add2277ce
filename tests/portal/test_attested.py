"""Attested documents: valid documents, and every reason to reject a document."""

import random
from datetime import timedelta

import pytest
from azure_documents import VM_ID, YEAR, Authority, base64_of, said, written
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from verifier_kit import NAME, NOW, VerifierKit, with_bag

from bridge.portal.attested import MAX_DOCUMENT_CHARACTERS, DocumentRefused
from bridge.system.access_tokens import DocumentRefusal

SHA256 = bytes.fromhex("0609608648016503040201")
SHA256_WITH_RSA = bytes.fromhex("06092a864886f70d01010b")


# Accepted documents.


@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "attributes"])
@pytest.mark.parametrize("name", [NAME, "westeurope.metadata.azure.com", "usgovvirginia.metadata.azure.us"])
def test_valid_document_identifies_its_vm(verifier, attributes, name):
    assert verifier.accepts(verifier.document(names=("elsewhere.example.net", name), attributes=attributes))


@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "attributes"])
def test_wrong_digest_identifier_of_real_azure_documents_is_accepted(verifier, attributes):
    der = verifier.document(attributes=attributes)
    assert der.count(SHA256) == 2
    assert verifier.accepts(der.replace(SHA256, SHA256_WITH_RSA))


def test_signer_with_an_elliptic_curve_key_is_accepted():
    verifier = VerifierKit(Authority(NOW, key=ec.generate_private_key(ec.SECP384R1())))
    assert verifier.accepts(verifier.document())


def test_intermediate_certificate_can_be_in_the_document(azure):
    verifier = VerifierKit(azure, known=())
    assert verifier.refusal(verifier.document()) is DocumentRefusal.UNTRUSTED
    assert verifier.accepts(verifier.document(azure.intermediate))


def test_clock_skew_of_one_minute_and_document_age_of_five_minutes_are_allowed(verifier):
    for seconds in (60, -300):
        made_at = NOW + timedelta(seconds=seconds)
        assert verifier.accepts(verifier.document(content=said(verifier.challenges.new(), made_at)))


# Rejected documents, in the order of the checks.


def test_too_large_document_is_rejected_before_parsing(verifier):
    assert verifier.refusal("A" * (MAX_DOCUMENT_CHARACTERS + 1)) is DocumentRefusal.TOO_LARGE


@pytest.mark.parametrize(
    "document",
    ["", "A", "äöü", "AAAA\n", "=" * 8, "MIIB", "\0", base64_of(b"0" * 99), base64_of(b"\x30\x80" * 10_000)],
)
def test_invalid_encoding_is_malformed(verifier, document):
    assert verifier.refusal(document) is DocumentRefusal.MALFORMED


def test_document_with_trailing_bytes_is_malformed(verifier):
    assert verifier.refusal(verifier.document() + b"\0") is DocumentRefusal.MALFORMED


@pytest.mark.parametrize("others", [0, 1])
def test_document_without_the_certificate_of_its_signer_is_rejected(verifier, azure, others):
    signer, other = azure.signer(NAME), azure.signer(NAME)
    der = azure.document(verifier.content(), signer)
    assert verifier.refusal(with_bag(der, *[other][:others])) is DocumentRefusal.UNKNOWN_SIGNER
    assert verifier.accepts(with_bag(der, other, signer))


def test_ambiguous_issuer_and_serial_are_rejected(verifier, azure, stranger):
    mine = azure.signer(NAME, serial=4711)
    his = stranger.signer(NAME, serial=4711)
    assert verifier.refusal(stranger.document(verifier.content(), his, mine)) is DocumentRefusal.UNKNOWN_SIGNER
    assert verifier.refusal(azure.document(verifier.content(), mine, his)) is DocumentRefusal.UNKNOWN_SIGNER


def test_changed_content_is_rejected(verifier):
    other = b"7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b91"
    for attributes, reason in ((True, DocumentRefusal.TAMPERED), (False, DocumentRefusal.FORGED)):
        der = verifier.document(attributes=attributes)
        assert verifier.refusal(der.replace(VM_ID.encode(), other)) is reason


def test_signature_of_another_key_is_forged(verifier, stranger):
    for attributes in (False, True):
        der = verifier.document(attributes=attributes)
        assert verifier.refusal(der[:-1] + bytes([der[-1] ^ 1])) is DocumentRefusal.FORGED
        assert verifier.refusal(verifier.document(attributes=attributes, key=stranger.key)) is DocumentRefusal.FORGED


def test_valid_certificate_before_the_signer_certificate_does_not_help(verifier, azure, stranger):
    """The first certificate in the document is Azure's, but the signature names the second, foreign certificate."""
    good = azure.signer(NAME)
    for name in (NAME, "example.net"):
        his = stranger.signer(name)
        der = stranger.document(verifier.content(), his, good, azure.intermediate)
        first, second = good.public_bytes(Encoding.DER), his.public_bytes(Encoding.DER)
        der = der.replace(second + first, first + second)
        assert verifier.refusal(der) in {DocumentRefusal.UNTRUSTED, DocumentRefusal.WRONG_NAME}


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("example.net",),
        ("metadata.azure.com.example.net",),
        ("evilmetadata.azure.com",),
        ("a.b.metadata.azure.com",),
        ("*.metadata.azure.com",),
        ("metadata.azure.de",),
        (".metadata.azure.com",),
        ("azure.com",),
    ],
)
def test_certificate_for_another_name_is_rejected(verifier, names):
    assert verifier.refusal(verifier.document(names=names)) is DocumentRefusal.WRONG_NAME


def test_foreign_root_with_the_same_names_is_not_trusted(verifier, stranger):
    der = stranger.document(verifier.content(), stranger.signer(NAME), stranger.intermediate, stranger.root)
    assert verifier.refusal(der) is DocumentRefusal.UNTRUSTED


def test_signer_certificate_cannot_issue_certificates(verifier, azure):
    signer = azure.signer(NAME)
    below = Authority(NOW, key=azure.key)
    below._key, below.root = azure.key, signer  # a certificate signed with the key of a signer
    forged = below._issued("x", NAME, below.key, azure.key, names=(NAME,))
    assert verifier.refusal(azure.document(verifier.content(), forged, signer)) is DocumentRefusal.UNTRUSTED


@pytest.mark.parametrize("valid", [(-YEAR, -timedelta(seconds=1)), (timedelta(hours=1), YEAR)])
def test_certificate_outside_its_validity_is_not_trusted(verifier, valid):
    assert verifier.refusal(verifier.document(valid=valid)) is DocumentRefusal.UNTRUSTED


def test_certificate_for_another_purpose_is_not_trusted(verifier):
    assert verifier.refusal(verifier.document(usage=ExtendedKeyUsageOID.CODE_SIGNING)) is DocumentRefusal.UNTRUSTED


def test_too_short_key_is_rejected():
    verifier = VerifierKit(Authority(NOW, key=rsa.generate_private_key(public_exponent=65537, key_size=1024)))
    assert verifier.refusal(verifier.document()) is DocumentRefusal.MALFORMED


@pytest.mark.parametrize("nonce", ["20300506-070809", "a" * 32, "", "\0"])
def test_nonce_without_a_challenge_is_rejected(verifier, nonce):
    assert verifier.refusal(verifier.document(content=said(nonce, NOW))) is DocumentRefusal.OLD_NONCE


def test_document_is_accepted_once(verifier):
    der = verifier.document()
    assert verifier.accepts(der)
    assert verifier.refusal(der) is DocumentRefusal.REPLAYED
    assert (
        verifier.refusal(verifier.document(content=said(verifier.challenges.new(), NOW, vmId=None)))
        is DocumentRefusal.MALFORMED
    )


@pytest.mark.parametrize(
    ("created", "expires", "reason"),
    [
        (-301, 21_600, DocumentRefusal.TOO_OLD),
        (-25_200, -3_600, DocumentRefusal.TOO_OLD),
        (0, 0, DocumentRefusal.TOO_OLD),
        (61, 21_600, DocumentRefusal.NOT_YET_VALID),
    ],
)
def test_document_outside_its_validity_is_rejected(verifier, created, expires, reason):
    ends = (("createdOn", created), ("expiresOn", expires))
    times = {name: written(NOW + timedelta(seconds=at)) for name, at in ends}
    assert verifier.refusal(verifier.document(content=verifier.content(timeStamp=times))) is reason


def test_unlisted_subscription_is_rejected(verifier):
    other = "00000000-8125-4ba9-a717-bf7490507b3d"
    content = verifier.content(subscriptionId=other)
    assert verifier.refusal(verifier.document(content=content)) is DocumentRefusal.SUBSCRIPTION_NOT_LISTED


@pytest.mark.parametrize(
    "vm_id",
    [
        *("", "vm", VM_ID + "0", "{" + VM_ID + "}", VM_ID.replace("-", ""), "../" + VM_ID, f" {VM_ID}", f"{VM_ID}\n"),
        *(VM_ID.replace("7", "\uff17"), f"{VM_ID}\0", f"urn:uuid:{VM_ID}"),
    ],
)
def test_vm_id_that_is_not_a_uuid_is_rejected(verifier, vm_id):
    assert verifier.refusal(verifier.document(content=verifier.content(vmId=vm_id))) is DocumentRefusal.NO_VM_ID


@pytest.mark.parametrize("name", ["nonce", "subscriptionId", "vmId", "timeStamp"])
@pytest.mark.parametrize("value", [None, 1, [], {}, True])
def test_content_with_wrong_types_is_malformed(verifier, name, value):
    content = said(verifier.challenges.new(), NOW, **{name: value})
    assert verifier.refusal(verifier.document(content=content)) is DocumentRefusal.MALFORMED


@pytest.mark.parametrize("content", [b"x", b"[]", b"{", b"\xff", b"null", b"[" * 5000, b'{"vmId": "a", "vmId": "b"}'])
def test_content_that_is_not_a_json_object_is_malformed(verifier, content):
    assert verifier.refusal(verifier.document(content=content)) is DocumentRefusal.MALFORMED


# An IMDS that returns documents of earlier requests.


def test_preferred_nonce_accepts_only_another_nonce_and_only_for_five_minutes(azure, stranger):
    verifier = VerifierKit(azure, nonce="preferred")
    der = verifier.document(content=said("20300506-070809", NOW))
    assert verifier.accepts(der)
    assert verifier.accepts(der)  # the service returns the same document to every request
    verifier.clock.advance(301)
    assert verifier.refusal(der) is DocumentRefusal.TOO_OLD
    assert verifier.refusal(stranger.document(verifier.content(), stranger.signer(NAME))) is DocumentRefusal.UNTRUSTED
    assert len(verifier.used) == 0


# Fuzzing.


def test_document_with_any_changed_byte_is_rejected_without_an_error(verifier):
    """The test changes each byte to one other value."""
    chance = random.Random(4711)
    der = verifier.document()
    verifier.verifier.vm_of(base64_of(der))
    accepted = 0
    for position in range(len(der)):
        changed = der[:position] + bytes([der[position] ^ (1 << chance.randrange(8))]) + der[position + 1 :]
        try:
            verifier.verifier.vm_of(base64_of(changed))
            accepted += 1
        except DocumentRefused as refused:
            # The nonce was used above. A replay passed all other checks, so its content is unchanged.
            if refused.reason is DocumentRefusal.REPLAYED:
                continue
    assert accepted == 0
