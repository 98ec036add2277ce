"""The poller with `credential = "attested"`: it sends the token of the portal, renews it, and never hangs."""

import contextlib
import logging

import pytest
from attesting import Attesting
from portal_stub import PortalStub

from bridge.config.settings import ImdsSettings
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.testing import Simulator


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def portal(tmp_path):
    with PortalStub(tmp_path / "portal", tls=False, attesting=Attesting()) as portal:
        yield portal


@pytest.fixture
def options(azure):
    """Return the options of a poller that sends the documents of the simulator."""
    with contextlib.closing(ImdsClient(ImdsSettings(endpoint=azure.endpoint))) as imds:
        vm = VmIdentity(vm_id=azure.machines[0].vm_id.upper())
        yield {"remote": {"credential": "attested"}, "document": imds.attested_document, "vm": lambda: vm}


def test_each_request_sends_the_same_token_for_this_vm(azure, portal, desk, options, start):
    (machine,), attesting = azure.machines, portal.attesting
    portal.put(machine.vm_id, "a")
    start(portal, **options)
    assert desk.has("a")
    portal.put(machine.vm_id, "b")
    assert desk.has("b")
    assert {request.authorization for request in portal.requests} == {"Bearer token-1"}
    (content,) = attesting.documents
    assert (content["vmId"], content["nonce"]) == (machine.vm_id, attesting.challenges[0])
    assert len(attesting.challenges) == 1


def test_refused_token_is_renewed_without_needs_attention(azure, portal, desk, options, start, caplog):  # noqa: PLR0917
    (machine,), attesting = azure.machines, portal.attesting
    start(portal, wait=lambda stop, _: stop.wait(0.05), **options)
    assert portal.wait_for_requests(2)
    attesting.tokens.clear()  # as after a restart of a portal with another secret
    portal.put(machine.vm_id, "a")
    assert desk.has("a")
    portal.put(machine.vm_id, "b")
    assert desk.has("b")
    assert len(attesting.challenges) == 2
    assert portal.requests[-1].authorization == "Bearer token-2"
    assert [line.levelno for line in caplog.records if "401" in line.getMessage()] == [logging.WARNING]
