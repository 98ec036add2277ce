"""No HTTP peer makes the agent unpack anything: nothing compressed is asked for, and what comes so is not read."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time

import pytest
from azure.core.exceptions import AzureError

from bridge.approval.portal_client import PortalClient
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.errors import DocumentInvalid, ImdsStatus, PortalFailed
from bridge.http.session import DeadlineSession, ResponseEncoded
from bridge.imds.client import ImdsClient
from bridge.sink import DeliveryFailed
from bridge.system.access_tokens import fetch_token
from bridge.testing.http_peer import HttpPeer
from bridge.testing.records import sample_record
from sinks.otlp.sink import OtlpConfig, OtlpSink
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink

VM = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
DOCUMENT = b'{"DocumentIncarnation": 1, "Events": []}'
CODINGS = ["gzip", "x-gzip", "deflate", "br", "zstd", "identity, gzip", "gzip, identity", "GZIP", "unheard-of"]
NO_GZIP = b"this is no gzip"


@pytest.fixture
def peer():
    with HttpPeer() as each:
        yield each


def url_of(peer):
    return f"http://{peer.address.authority}"


def compressed(peer, body, *, status=200, coding="gzip", **headers):
    peer.say(status, headers={"Content-Encoding": coding, **headers}, body=body)


@pytest.fixture
def imds(peer):
    client = ImdsClient(endpoint=url_of(peer), api_version="2020-07-01", timeout_seconds=5.0, first_timeout_seconds=5.0)
    yield client
    client.close()


@pytest.fixture
def portal(peer):
    keys = (KeySettings(kid="k", approver="portal", public_key_file="/nowhere"),)
    client = PortalClient(RemoteSettings(url=url_of(peer), keys=keys, wait_seconds=1))
    yield client
    client.close()


# The session that all but Entra's share.


@pytest.mark.parametrize("coding", CODINGS)
def test_a_compressed_body_is_refused_before_any_of_it_is_read(coding):
    def promise():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode())
            connection.recv(1)  # the body is never sent: who waits for it waits until the deadline

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=promise)
        server.start()
        began = time.monotonic()
        with DeadlineSession() as session, pytest.raises(ResponseEncoded) as refused:
            session.request("GET", f"http://127.0.0.1:{listener.getsockname()[1]}", deadline_seconds=20)
        assert time.monotonic() - began < 10
        server.join()
    assert refused.value.response.content == b""


@pytest.mark.parametrize("coding", ["", "identity", "Identity", "identity, identity"])
def test_a_body_as_it_is_is_read(peer, coding):
    compressed(peer, b"as it is", coding=coding)
    with DeadlineSession() as session:
        assert session.request("GET", url_of(peer), deadline_seconds=5).content == b"as it is"


def test_no_compressed_body_is_asked_for(peer):
    with DeadlineSession() as session:
        session.request("GET", url_of(peer), deadline_seconds=5)
    assert peer.requests[0].headers["accept-encoding"] == "identity"


# The metadata service.


def test_a_compressed_document_of_the_metadata_service_is_none(peer, imds):
    compressed(peer, gzip.compress(DOCUMENT))
    with pytest.raises(DocumentInvalid, match="Content-Encoding"):
        imds.scheduled_events()


def test_a_status_of_the_metadata_service_counts_whatever_its_body_is(peer, imds):
    compressed(peer, NO_GZIP, status=429, **{"Retry-After": "7"})
    with pytest.raises(ImdsStatus) as refused:
        imds.scheduled_events()
    assert (refused.value.status, refused.value.retry_after_seconds) == (429, 7.0)


def test_an_approval_that_azure_took_is_taken_whatever_the_body_of_its_answer_is(peer, imds):
    compressed(peer, NO_GZIP)
    assert imds.start_requests(["E1"], incarnation=1) == 200


# The portal.


def test_a_compressed_answer_of_the_portal_is_not_used(peer, portal):
    compressed(peer, gzip.compress(b'{"index": 5, "decisions": []}'))
    with pytest.raises(PortalFailed, match="Content-Encoding") as failed:
        portal.poll(VM, index=0)
    assert not failed.value.needs_attention


def test_a_status_of_the_portal_counts_whatever_its_body_is(peer, portal):
    compressed(peer, NO_GZIP, status=503, **{"Retry-After": "7"})
    with pytest.raises(PortalFailed, match="503") as failed:
        portal.poll(VM, index=0)
    assert failed.value.retry_after_seconds == 7.0
    compressed(peer, b"", status=204)
    assert portal.poll(VM, index=3).index == 3


# Sinks: what counts is the status. Event Hubs over HTTPS is in tests/sinks/eventhubs/test_contract.py.


@pytest.fixture(params=["webhook", "otlp"])
def sink(request, peer):
    if request.param == "webhook":
        made = WebhookSink(WebhookConfig(name="w", url=url_of(peer), timeout_seconds=5))
    else:
        made = OtlpSink(OtlpConfig(name="o", endpoint=url_of(peer), timeout_seconds=5))
    yield made
    made.close()


def test_a_sink_takes_a_compressed_answer_by_its_status(peer, sink):
    compressed(peer, NO_GZIP)
    sink.send([sample_record()])
    compressed(peer, NO_GZIP, status=503, **{"Retry-After": "7"})
    with pytest.raises(DeliveryFailed, match="503") as failed:
        sink.send([sample_record()])
    assert failed.value.retry_after == 7.0


# Entra ID, by azure-identity's own requests.


@pytest.fixture
def identity(peer, monkeypatch):
    for name in ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", url_of(peer))
    expires_on = str(int(time.time()) + 3_600)
    token = {"access_token": "t0ken", "expires_in": "3600", "expires_on": expires_on, "resource": "r"}
    return json.dumps({**token, "token_type": "Bearer"}).encode()


def test_a_token_is_asked_for_uncompressed(peer, identity):
    peer.say(200, headers={"Content-Type": "application/json"}, body=identity)
    assert fetch_token("api://portal").token == "t0ken"
    assert {request.headers["accept-encoding"] for request in peer.requests} == {"identity"}


def test_a_compressed_token_is_not_unpacked(peer, identity):
    compressed(peer, gzip.compress(identity), **{"Content-Type": "application/json"})
    with pytest.raises(AzureError):
        fetch_token("api://portal")


def test_an_endless_token_is_not_read_to_its_end(peer, identity):
    peer.say(200, headers={"Content-Type": "application/json"}, body=identity + b" " * (2 << 20))
    with pytest.raises(AzureError):
        fetch_token("api://portal")
