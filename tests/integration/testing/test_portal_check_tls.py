"""The conformance kit over TLS: portals that identify a VM by its client certificate, and untrusted portals."""

import ssl

import pytest
from outside_portal import Signer
from private_ca import PrivateCa
from small_portal import Said, SmallPortal

from bridge.config.approval import KeySettings, RemoteSettings
from bridge.testing.portal_check.check import CheckSettings, check_portal
from bridge.testing.portal_check.report import Result
from bridge.testing.portal_check.requirements import Requirement

VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"


class KnowsByTls(SmallPortal):
    """Treats every client that passes TLS as the VM."""

    def refused(self, asked):
        return None if asked.vm_id == self.vm_id else Said(403)


@pytest.fixture
def authority(tmp_path):
    return PrivateCa(tmp_path / "ca")


@pytest.fixture
def serve(tmp_path):
    portals = []

    def made(tls):
        portals.append(KnowsByTls(Signer(tmp_path, "ops"), vm_id=VM_ID, token="unused", tls=tls))
        return portals[-1].url

    yield made
    for each in portals:
        each.close()


def checked(url, authority, **remote):
    unused = (KeySettings(kid="unused", approver="unused", public_key_file="unused"),)
    settings = RemoteSettings(url=url, ca_file=str(authority.ca_file), wait_seconds=2, keys=unused, **remote)
    report = check_portal(CheckSettings(remote=settings, vm_id=VM_ID))
    return {each.requirement: each for each in report.findings}


def shows(authority):
    cert_file, key_file = authority.issue("vm")
    return {"client_cert_file": str(cert_file), "client_key_file": str(key_file)}


def broken(found):
    return {each.key for each, finding in found.items() if finding.result is Result.NOT_MET}


def test_portal_that_requires_a_client_certificate_meets_only_this_vm(serve, authority):
    found = checked(serve(authority.server_context(wants_client=True)), authority, **shows(authority))
    assert broken(found) == set()
    for each in (Requirement.ONLY_THIS_VM, Requirement.OTHER_VM, Requirement.HELD, Requirement.INDEX_AHEAD):
        assert found[each].result is Result.MET
    assert found[Requirement.CHALLENGE].result is Result.NOT_TRIED


def test_portal_with_an_optional_client_certificate_fails_only_this_vm(serve, authority):
    tls = authority.server_context(wants_client=True)
    tls.verify_mode = ssl.CERT_OPTIONAL
    found = checked(serve(tls), authority, **shows(authority))
    assert broken(found) == {"only-this-vm"}
    finding = found[Requirement.ONLY_THIS_VM]
    assert finding.asked.endswith(", without a client certificate")
    assert finding.answered.startswith("200, ")


def test_unknown_client_certificate_is_reported(serve, authority, tmp_path):
    stranger = PrivateCa(tmp_path / "stranger")
    found = checked(serve(authority.server_context(wants_client=True)), authority, **shows(stranger))
    assert broken(found) == {"answered"}
    assert found[Requirement.ANSWERED].asked.endswith(", with the client certificate")


def test_check_stops_at_a_portal_certificate_of_another_authority(serve, authority, tmp_path):
    stranger = PrivateCa(tmp_path / "stranger")
    found = checked(serve(stranger.server_context()), authority)
    assert broken(found) == {"answered"}
    assert "certificate verify failed" in found[Requirement.ANSWERED].detail
    assert found[Requirement.ONLY_THIS_VM].result is Result.NOT_TRIED


def test_portal_certificate_for_another_name_is_reported(serve, authority):
    tls = authority.server_context()
    found = checked(serve(tls).replace("127.0.0.1", "127.0.0.2"), authority)
    assert broken(found) == {"answered"}


def test_portal_without_tls_is_reported(serve, authority):
    found = checked(serve(None).replace("http:", "https:"), authority)
    assert broken(found) == {"answered"}
    assert "no answer: " in found[Requirement.ANSWERED].detail
