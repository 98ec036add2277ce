"""Intermediate certificates: the portal fetches them only from listed addresses, at a limited rate."""

import pytest
from azure_documents import Authority
from cryptography.hazmat.primitives.serialization import Encoding
from verifier_kit import NAME, NOW

from bridge.portal.certificate_chain import (
    MAX_CERTIFICATE_BYTES,
    IntermediateCertificates,
    azure_roots,
)
from bridge.testing import ManualClock
from bridge.testing.http_contract import Answer, HttpPeer


@pytest.fixture
def clock():
    return ManualClock(NOW)


@pytest.fixture
def shelf(azure):
    """A peer that returns the certificate of the intermediate in DER form at every path."""
    with HttpPeer() as peer:
        peer.reply(lambda _: Answer(body=azure.intermediate.public_bytes(Encoding.DER)))
        peer.base = f"http://{peer.address.authority}/certs"
        yield peer


def intermediates(clock, shelf, **options):
    return IntermediateCertificates(clock=clock.clock, base_urls=(shelf.base,), **options)


def asked(shelf):
    return [request.path for request in shelf.requests]


@pytest.mark.parametrize("encoding", [Encoding.DER, Encoding.PEM])
def test_missing_intermediate_is_fetched_once(clock, shelf, azure, encoding):
    shelf.reply(lambda _: Answer(body=azure.intermediate.public_bytes(encoding)))
    found = intermediates(clock, shelf)
    for _ in range(3):
        found.fetch_for(azure.signer(NAME, at=f"{shelf.base}/ca%2001.crt"))
    assert found.available() == (azure.intermediate,)
    assert asked(shelf) == ["/certs/ca%2001.crt"]


def test_certificates_of_further_issuers_are_fetched(clock, shelf, azure):
    certificates = {
        "/certs/ca.crt": azure.signer("ca", at=f"{shelf.base}/cross.crt"),
        "/certs/cross.crt": azure.intermediate,
    }
    shelf.reply(lambda request: Answer(body=certificates[request.path].public_bytes(Encoding.DER)))
    found = intermediates(clock, shelf)
    found.fetch_for(azure.signer(NAME, at=f"{shelf.base}/ca.crt"))
    assert found.available() == tuple(certificates.values())


def test_intermediate_is_refreshed_after_a_day_and_kept_on_failure(clock, shelf, azure):
    found, signer = intermediates(clock, shelf), azure.signer(NAME, at=f"{shelf.base}/ca.crt")
    found.fetch_for(signer)
    clock.advance(86_401)
    shelf.reply(lambda _: Answer(status=500))
    stranger = Authority(NOW).signer(NAME, at=f"{shelf.base}/ca.crt")
    found.fetch_for(stranger)
    assert found.available() == (azure.intermediate,)
    assert len(shelf.requests) == 2


@pytest.mark.parametrize(
    "place",
    [
        "{origin}/other/ca.crt",
        "{origin}/certsx/ca.crt",
        "{origin}/certs",
        "{origin}/certs/../other/ca.crt",
        "{origin}/certs/%2e%2e/other/ca.crt",
        "{origin}/certs/a%2f%2e%2e%2f%2e%2e%2fother/ca.crt",
        "{origin}/certs/..",
        "{origin}/certs/ca.crt?x=1",
        "{origin}/certs/ca.crt#x",
        "http://example.net/certs/ca.crt",
        "http://user@{authority}/certs/ca.crt",
        "ldap://{authority}/certs/ca.crt",
        "file:///certs/ca.crt",
        "http://[/certs/ca.crt",
        "",
    ],
)
def test_unlisted_addresses_are_not_requested(clock, shelf, azure, place):
    authority = shelf.address.authority
    found = intermediates(clock, shelf)
    found.fetch_for(azure.signer(NAME, at=place.format(origin=f"http://{authority}", authority=authority)))
    assert found.available() == ()
    assert not shelf.requests


@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=404),
        Answer(status=302, headers={"Location": "/certs/other"}),
        Answer(body=b""),
        Answer(body=b"<html>"),
        Answer(body=b"-----BEGIN CERTIFICATE-----\n"),
        Answer(body=b"0" * (MAX_CERTIFICATE_BYTES + 1)),
        None,
    ],
)
def test_failed_fetch_is_not_retried_immediately(clock, shelf, azure, answer, caplog):
    if answer is None:
        answer = Answer(body=Authority(NOW).intermediate.public_bytes(Encoding.DER))  # of a stranger with the same name
    shelf.reply(lambda _: answer)
    found, signer = intermediates(clock, shelf), azure.signer(NAME, at=f"{shelf.base}/secret-words.crt")
    for _ in range(5):
        found.fetch_for(signer)
    assert len(shelf.requests) == 1
    assert "secret-words" not in caplog.text
    clock.advance(86_401)
    shelf.reply(lambda _: Answer(body=azure.intermediate.public_bytes(Encoding.DER)))
    found.fetch_for(signer)
    assert azure.intermediate in found.available()


def test_forged_certificates_cause_at_most_ten_requests_per_minute(clock, shelf, azure):
    shelf.reply(lambda _: Answer(status=404))
    found = intermediates(clock, shelf)
    for number in range(60):
        found.fetch_for(azure.signer(NAME, at=f"{shelf.base}/{number}.crt"))
        clock.advance(0.1)
    assert len(shelf.requests) == 10
    for number in range(70):
        found.fetch_for(azure.signer(NAME, at=f"{shelf.base}/again-{number}.crt"))
        clock.advance(6.1)
    assert len(found._fetched) <= 64


def test_azure_roots_are_in_certifi():
    names = {each.subject.rfc4514_string() for each in azure_roots()}
    assert any("DigiCert Global Root G2" in name for name in names)
    assert any("Microsoft RSA Root Certificate Authority 2017" in name for name in names)
    assert len(names) < 12
