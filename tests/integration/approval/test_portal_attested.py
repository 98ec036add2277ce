"""The poller with `credential = "attested"`: it sends the token of the portal, renews it, and never hangs."""

import contextlib
import logging

import pytest
from attesting import Attesting
from portal_stub import PortalStub
from waiting import until

from bridge.approval.portal_client import PortalClient
from bridge.approval.portal_poller import PortalPoller
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.metrics.metrics import Metrics
from bridge.testing import Simulator

KEYS = (KeySettings(kid="k", approver="portal", public_key_file="/nowhere"),)
PATIENCE_SECONDS = 20.0
HELD_SECONDS = 20
STOP_SECONDS = 1.1


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def attesting():
    return Attesting()


@pytest.fixture
def portal(tmp_path, attesting):
    with PortalStub(tmp_path / "portal", tls=False, attesting=attesting) as portal:
        yield portal


@pytest.fixture
def got():
    return []


@pytest.fixture
def start(portal, azure, got):
    """Return a function that starts a poller. *document* replaces the metadata service."""
    with contextlib.ExitStack() as stack:
        imds = stack.enter_context(contextlib.closing(client(azure)))

        def started(document=imds.attested_document, **options):
            remote = RemoteSettings(
                url=portal.url,
                credential="attested",
                ca_file=None if portal.ca_file is None else str(portal.ca_file),
                keys=KEYS,
                wait_seconds=HELD_SECONDS,
            )
            poller = PortalPoller(
                PortalClient(remote, document=document),
                metrics=Metrics().approval_channel(),
                **{"vm": lambda: VmIdentity(vm_id=azure.machines[0].vm_id.upper()), "receive": got.extend, **options},
            )
            stack.callback(poller.stop)
            poller.start()
            return poller

        yield started


def client(azure):
    return ImdsClient(endpoint=azure.endpoint, api_version="2020-07-01", timeout_seconds=5.0, first_timeout_seconds=5.0)


def soon(stop, _):
    return stop.wait(0.05)


def test_each_request_sends_the_same_token_for_this_vm(azure, attesting, portal, start, got):
    (machine,) = azure.machines
    portal.put(machine.vm_id, "a")
    start()
    until(lambda: "a" in got)
    portal.put(machine.vm_id, "b")
    until(lambda: "b" in got)
    assert {request.authorization for request in portal.requests} == {"Bearer token-1"}
    (content,) = attesting.documents
    assert (content["vmId"], content["nonce"]) == (machine.vm_id, attesting.challenges[0])
    assert len(attesting.challenges) == 1


def test_refused_token_is_renewed_without_needs_attention(azure, portal, start, got, caplog):
    (machine,), attesting = azure.machines, portal.attesting
    start(wait=soon)
    until(lambda: len(portal.requests) >= 2)
    attesting.tokens.clear()  # as after a restart of a portal with another secret
    portal.put(machine.vm_id, "a")
    until(lambda: "a" in got)
    portal.put(machine.vm_id, "b")
    until(lambda: "b" in got)
    assert len(attesting.challenges) == 2
    assert portal.requests[-1].authorization == "Bearer token-2"
    assert [line.levelno for line in caplog.records if "401" in line.getMessage()] == [logging.WARNING]
