"""Attested documents: which VM each speaks of, and every kind of which none may count."""

from __future__ import annotations

import logging
import random
from datetime import timedelta

import pytest
from azure_documents import SUBSCRIPTION_ID, VM_ID, YEAR, Authority, base64_of, said, written
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from document_desk import NAME, NOW, Desk, with_bag

from bridge.portal.attested import MAX_DOCUMENT_CHARACTERS, DocumentRefused
from bridge.system.access_tokens import DocumentRefusal
from bridge.testing import Machine, ManualClock, Simulator
from bridge.testing.simulator.faults import DOCUMENT_KINDS

SHA256 = bytes.fromhex("0609608648016503040201")
SHA256_WITH_RSA = bytes.fromhex("06092a864886f70d01010b")


# What counts.


@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "attributes"])
@pytest.mark.parametrize("name", [NAME, "westeurope.metadata.azure.com", "usgovvirginia.metadata.azure.us"])
def test_the_right_document_speaks_of_its_vm(desk, attributes, name):
    assert desk.accepts(desk.document(names=("elsewhere.example.net", name), attributes=attributes))


@pytest.mark.parametrize("attributes", [False, True], ids=["plain", "attributes"])
def test_the_wrong_digest_algorithm_of_real_documents_is_taken_for_what_it_means(desk, attributes):
    der = desk.document(attributes=attributes)
    assert der.count(SHA256) == 2
    assert desk.accepts(der.replace(SHA256, SHA256_WITH_RSA))


@pytest.mark.parametrize("digest", [hashes.SHA384, hashes.SHA512])
def test_other_digests_of_the_family_count(desk, digest):
    assert desk.accepts(desk.document(digest=digest()))


def test_a_signer_with_an_elliptic_key_counts():
    desk = Desk(Authority(NOW, key=ec.generate_private_key(ec.SECP384R1())))
    assert desk.accepts(desk.document())


def test_the_intermediate_may_be_in_the_document(azure):
    desk = Desk(azure, known=())
    assert desk.refusal(desk.document()) is DocumentRefusal.UNTRUSTED
    assert desk.accepts(desk.document(azure.intermediate))


def test_the_clocks_may_differ_by_a_minute_and_a_document_is_good_for_five(desk):
    for seconds in (60, -300):
        made_at = NOW + timedelta(seconds=seconds)
        assert desk.accepts(desk.document(content=said(desk.challenges.new(), made_at)))


def test_vm_and_subscription_are_compared_without_case(desk):
    content = desk.content(vmId=VM_ID.upper(), subscriptionId=SUBSCRIPTION_ID.upper())
    assert desk.accepts(desk.document(content=content))


# What does not, in the order of the checks.


def test_a_document_that_is_too_large_is_not_even_read(desk):
    assert desk.refusal("A" * (MAX_DOCUMENT_CHARACTERS + 1)) is DocumentRefusal.TOO_LARGE


@pytest.mark.parametrize(
    "document",
    ["", "A", "äöü", "AAAA\n", "=" * 8, "MIIB", "\0", base64_of(b"0" * 99), base64_of(b"\x30\x80" * 10_000)],
)
def test_what_is_no_document_is_malformed(desk, document):
    assert desk.refusal(document) is DocumentRefusal.MALFORMED


def test_a_document_with_something_after_it_is_malformed(desk):
    assert desk.refusal(desk.document() + b"\0") is DocumentRefusal.MALFORMED


def test_a_document_without_its_content_is_malformed(desk):
    der = desk.document(content=b"x")
    assert desk.refusal(der) is DocumentRefusal.MALFORMED


def test_two_signers_are_not_one(desk, azure):
    other = azure.signer(NAME)
    assert desk.refusal(desk.document(again=other)) is DocumentRefusal.NOT_ONE_SIGNER


@pytest.mark.parametrize("others", [0, 1])
def test_a_document_without_its_signers_certificate_names_nobody(desk, azure, others):
    signer, other = azure.signer(NAME), azure.signer(NAME)
    der = azure.document(desk.content(), signer)
    assert desk.refusal(with_bag(der, *[other][:others])) is DocumentRefusal.UNKNOWN_SIGNER
    assert desk.accepts(with_bag(der, other, signer))


def test_two_certificates_of_one_issuer_and_serial_name_nobody(desk, azure, stranger):
    mine = azure.signer(NAME, serial=4711)
    his = stranger.signer(NAME, serial=4711)
    assert desk.refusal(stranger.document(desk.content(), his, mine)) is DocumentRefusal.UNKNOWN_SIGNER
    assert desk.refusal(azure.document(desk.content(), mine, his)) is DocumentRefusal.UNKNOWN_SIGNER


def test_a_changed_content_is_not_what_was_signed(desk):
    other = b"7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b91"
    for attributes, reason in ((True, DocumentRefusal.TAMPERED), (False, DocumentRefusal.FORGED)):
        der = desk.document(attributes=attributes)
        assert desk.refusal(der.replace(VM_ID.encode(), other)) is reason


def test_a_signature_of_another_key_is_forged(desk, stranger):
    for attributes in (False, True):
        der = desk.document(attributes=attributes)
        assert desk.refusal(der[:-1] + bytes([der[-1] ^ 1])) is DocumentRefusal.FORGED
        assert desk.refusal(desk.document(attributes=attributes, key=stranger.key)) is DocumentRefusal.FORGED


def test_a_good_certificate_before_the_signers_helps_nobody(desk, azure, stranger):
    """The first certificate in the bag is Azure's; the signature names the stranger's, behind it."""
    good = azure.signer(NAME)
    for name in (NAME, "example.net"):
        his = stranger.signer(name)
        der = stranger.document(desk.content(), his, good, azure.intermediate)
        first, second = good.public_bytes(Encoding.DER), his.public_bytes(Encoding.DER)
        der = der.replace(second + first, first + second)
        assert desk.refusal(der) in {DocumentRefusal.UNTRUSTED, DocumentRefusal.WRONG_NAME}


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
def test_a_certificate_for_another_name_is_not_of_the_metadata_service(desk, names):
    assert desk.refusal(desk.document(names=names)) is DocumentRefusal.WRONG_NAME


def test_a_foreign_root_is_not_trusted_whatever_its_names(desk, stranger):
    der = stranger.document(desk.content(), stranger.signer(NAME), stranger.intermediate, stranger.root)
    assert desk.refusal(der) is DocumentRefusal.UNTRUSTED


def test_a_signer_that_issues_a_signer_is_no_authority(desk, azure):
    signer = azure.signer(NAME)
    below = Authority(NOW, key=azure.key)
    below._key, below.root = azure.key, signer  # what a signer's key signs
    forged = below._issued("x", NAME, below.key, azure.key, names=(NAME,))
    assert desk.refusal(azure.document(desk.content(), forged, signer)) is DocumentRefusal.UNTRUSTED


@pytest.mark.parametrize("valid", [(-YEAR, -timedelta(seconds=1)), (timedelta(hours=1), YEAR)])
def test_a_certificate_out_of_its_time_is_not_trusted(desk, valid):
    assert desk.refusal(desk.document(valid=valid)) is DocumentRefusal.UNTRUSTED


def test_a_certificate_for_another_purpose_is_not_trusted(desk):
    assert desk.refusal(desk.document(usage=ExtendedKeyUsageOID.CODE_SIGNING)) is DocumentRefusal.UNTRUSTED


def test_a_key_that_is_too_short_is_not_tried():
    desk = Desk(Authority(NOW, key=rsa.generate_private_key(public_exponent=65537, key_size=1024)))
    assert desk.refusal(desk.document()) is DocumentRefusal.MALFORMED


@pytest.mark.parametrize("nonce", ["20300506-070809", "a" * 32, "", "\0"])
def test_a_nonce_that_is_no_challenge_is_refused(desk, nonce):
    assert desk.refusal(desk.document(content=said(nonce, NOW))) is DocumentRefusal.OLD_NONCE


def test_an_old_challenge_is_refused(desk):
    nonce = desk.challenges.new()
    desk.clock.advance(361)
    assert desk.refusal(desk.document(content=said(nonce, desk.clock.now()))) is DocumentRefusal.OLD_NONCE


def test_a_document_counts_once(desk):
    der = desk.document()
    assert desk.accepts(der)
    assert desk.refusal(der) is DocumentRefusal.REPLAYED
    assert desk.refusal(desk.document(content=said(desk.challenges.new(), NOW, vmId=None))) is DocumentRefusal.MALFORMED


@pytest.mark.parametrize(
    ("created", "expires", "reason"),
    [
        (-301, 21_600, DocumentRefusal.TOO_OLD),
        (-25_200, -3_600, DocumentRefusal.TOO_OLD),
        (0, 0, DocumentRefusal.TOO_OLD),
        (61, 21_600, DocumentRefusal.NOT_YET_VALID),
    ],
)
def test_a_document_out_of_its_time_is_refused(desk, created, expires, reason):
    ends = (("createdOn", created), ("expiresOn", expires))
    times = {name: written(NOW + timedelta(seconds=at)) for name, at in ends}
    assert desk.refusal(desk.document(content=desk.content(timeStamp=times))) is reason


def test_a_subscription_that_is_not_listed_is_refused(desk):
    other = "00000000-8125-4ba9-a717-bf7490507b3d"
    content = desk.content(subscriptionId=other)
    assert desk.refusal(desk.document(content=content)) is DocumentRefusal.SUBSCRIPTION_NOT_LISTED


@pytest.mark.parametrize("vm_id", ["", "vm", VM_ID + "0", "{" + VM_ID + "}", VM_ID.replace("-", ""), "../" + VM_ID])
def test_a_vm_id_that_is_no_uuid_is_refused(desk, vm_id):
    assert desk.refusal(desk.document(content=desk.content(vmId=vm_id))) is DocumentRefusal.NO_VM_ID


@pytest.mark.parametrize("name", ["nonce", "subscriptionId", "vmId", "timeStamp"])
@pytest.mark.parametrize("value", [None, 1, [], {}, True])
def test_a_content_of_another_shape_is_malformed(desk, name, value):
    content = said(desk.challenges.new(), NOW, **{name: value})
    assert desk.refusal(desk.document(content=content)) is DocumentRefusal.MALFORMED


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"null", b"[" * 5000, b'{"vmId": "a", "vmId": "b"}'])
def test_a_content_that_is_no_object_is_malformed(desk, content):
    assert desk.refusal(desk.document(content=content)) is DocumentRefusal.MALFORMED


@pytest.mark.parametrize("text", ["", "now", "13/45/30 00:00:00 -0000", "05/06/30 07:08:09", "0" * 99])
def test_times_that_azure_does_not_write_are_malformed(desk, text):
    content = desk.content(timeStamp={"createdOn": text, "expiresOn": text})
    assert desk.refusal(desk.document(content=content)) is DocumentRefusal.MALFORMED


# A service that gives documents of earlier requests.


def test_preferred_takes_another_nonce_for_five_minutes_and_nothing_else(azure, stranger):
    desk = Desk(azure, nonce="preferred")
    der = desk.document(content=said("20300506-070809", NOW))
    assert desk.accepts(der)
    assert desk.accepts(der)  # the service gives the same to each who asks
    desk.clock.advance(301)
    assert desk.refusal(der) is DocumentRefusal.TOO_OLD
    assert desk.refusal(stranger.document(desk.content(), stranger.signer(NAME))) is DocumentRefusal.UNTRUSTED
    assert len(desk.used) == 0


# The simulator's documents, faults and all.


@pytest.fixture
def simulated():
    clock = ManualClock(NOW)
    with Simulator(vms=[Machine(name="vm_0", subscription_id=SUBSCRIPTION_ID)], clock=clock) as simulator:
        yield simulator


def test_each_fault_of_the_simulator_is_seen_for_what_it_is(simulated):
    expected = {
        "cached_nonce": DocumentRefusal.OLD_NONCE,
        "tampered": DocumentRefusal.FORGED,
        "forged": DocumentRefusal.FORGED,
        "two_signers": DocumentRefusal.UNTRUSTED,
        "foreign_root": DocumentRefusal.UNTRUSTED,
        "foreign_name": DocumentRefusal.WRONG_NAME,
        "expired_document": DocumentRefusal.TOO_OLD,
        "wrong_digest_algorithm": None,
    }
    assert expected.keys() == DOCUMENT_KINDS.keys()
    (machine,) = simulated.machines
    azure = simulated.attestation
    root, intermediate = map(x509.load_pem_x509_certificate, (azure.root_pem, azure.intermediate_pem))
    desk = Desk(type("Azure", (), {"root": root, "intermediate": intermediate}))
    for kind, reason in expected.items():
        document = azure.document(machine, desk.challenges.new(), kind=kind)
        if reason is None:
            assert desk.verifier.vm_of(document).vm_id == machine.vm_id
        else:
            assert desk.refusal(document) is reason, kind
    assert desk.verifier.vm_of(azure.document(machine, desk.challenges.new())).vm_id == machine.vm_id


# Whatever comes.


def test_no_document_of_which_a_byte_differs_counts_for_another_vm_or_ends_in_an_error(desk):
    """Each byte is tried with one other value."""
    chance = random.Random(4711)
    der = desk.document()
    desk.verifier.vm_of(base64_of(der))
    accepted = 0
    for position in range(len(der)):
        changed = der[:position] + bytes([der[position] ^ (1 << chance.randrange(8))]) + der[position + 1 :]
        try:
            desk.verifier.vm_of(base64_of(changed))
            accepted += 1
        except DocumentRefused as refused:
            # The nonce was used above: what is a replay had passed all else, so it says what was signed.
            if refused.reason is DocumentRefusal.REPLAYED:
                continue
    assert accepted == 0


def test_nothing_is_logged_of_a_document_that_is_refused(desk, caplog):
    caplog.set_level(logging.DEBUG)
    desk.refusal(desk.document()[:-5])
    assert not caplog.records
