"""The poller's connections: certificates, tokens, proxies, and the end of requests that hang."""

import logging
import re
import threading
import time

import pytest
from least_time import least
from managed_identity import managed_identity
from poller_kit import KEYS, PATIENCE_SECONDS, STOP_SECONDS, VM, all_log_text, stop_in_time
from waiting import until

from bridge.approval.portal_client import PortalClient
from bridge.config.approval import RemoteSettings
from bridge.errors import PortalFailed
from bridge.system.access_tokens import RenewedToken
from bridge.testing.peers import closed_port, silent_listener


def test_only_the_configured_private_ca_is_trusted(secure, desk, start, caplog):
    portal = secure()
    portal.put(VM, "a")
    start(portal)
    assert desk.has("a")
    start(portal, remote={"ca_file": None})
    until(lambda: "CERTIFICATE_VERIFY_FAILED" in all_log_text(caplog))
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_client_certificate_authenticates_the_vm(secure, desk, start):
    portal = secure(client_certificates=True)
    certificate, key = portal.client_certificate()
    portal.put(VM, "a")
    start(portal, remote={"client_cert_file": str(certificate), "client_key_file": str(key)})
    assert desk.has("a")
    assert portal.requests[0].authorization is None


@pytest.mark.parametrize("missing", ["ca_file", "client_cert_file", "token_file"])
def test_missing_file_needs_attention_and_is_read_once_it_exists(  # noqa: PLR0917  # fixtures
    secure, tmp_path, desk, start, caplog, missing
):
    portal = secure(client_certificates=missing == "client_cert_file")
    certificate, key = portal.client_certificate()
    contents = {
        "ca_file": portal.ca_file.read_bytes(),
        "client_cert_file": certificate.read_bytes() + key.read_bytes(),
        "token_file": b"right",
    }
    portal.bearer = "right" if missing == "token_file" else None
    file = tmp_path / "comes later"
    portal.put(VM, "a")
    start(portal, remote={missing: str(file)}, wait=lambda stop, _: stop.wait(0.02))
    until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
    assert str(file) in all_log_text(caplog)
    assert not portal.requests
    file.write_bytes(contents[missing])
    assert desk.has("a")


def test_rotated_token_is_used_without_a_restart(portal, desk, start, tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")
    portal.bearer = "old"
    start(portal, remote={"token_file": str(token)}, wait=lambda stop, _: stop.wait(0.02))
    portal.put(VM, "a")
    assert desk.has("a")
    portal.bearer = "the new one"
    portal.put(VM, "b")
    until(lambda: portal.requests[-1].authorization == "Bearer old" and len(portal.requests) > 4)
    token.write_text("the-new-one\n")
    portal.bearer = "the-new-one"
    assert desk.has("b")


def test_environment_proxy_is_used_except_to_loopback(portal, monkeypatch):
    with closed_port() as address:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://{address.authority}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        client = PortalClient(RemoteSettings(url=portal.url, keys=KEYS, wait_seconds=1))
        assert client.poll(VM, index=0).index == 1
        client.close()
        outside = PortalClient(RemoteSettings(url="https://portal.invalid/", keys=KEYS))
        # The connection to the proxy is refused. The proxy's name resolves.
        with pytest.raises(PortalFailed, match="refused"):
            outside.poll(VM, index=0)
        outside.close()


# Entra ID.


def test_poller_stops_immediately_while_entra_hangs(portal, start):
    let_go = threading.Event()
    asked = threading.Event()

    def fetch():
        asked.set()
        let_go.wait(PATIENCE_SECONDS)
        raise RuntimeError("too late")

    token = RenewedToken(fetch, source="Entra ID")
    channel = start(portal, token=token)
    assert asked.wait(PATIENCE_SECONDS)
    stop_in_time(channel)
    let_go.set()
    assert not portal.requests


@pytest.mark.parametrize("scope", ["api://portal", "api://portal/.default"])
def test_managed_identity_token_is_sent_to_the_portal(portal, desk, start, monkeypatch, scope):
    portal.put(VM, "a")
    with managed_identity(monkeypatch):
        start(portal, remote={"entra_scope": scope})
        assert desk.has("a")
    assert re.fullmatch(r"Bearer [\w-]+\.[\w-]+\.[\w-]+", portal.requests[0].authorization)


# Deadlines, threads and stopping.


def test_stop_cancels_a_long_poll(portal, desk, start):
    channels = []

    def seconds_to_stop():
        asked = len(portal.requests)
        channels.append(start(portal))
        assert portal.wait_for_requests(asked + 2)
        began = time.monotonic()
        stop_in_time(channels[-1])
        return time.monotonic() - began

    assert least(seconds_to_stop, below=STOP_SECONDS) < STOP_SECONDS
    portal.put(VM, "after the end")
    for channel in channels:
        channel.stop()

    assert desk.tokens == []


def test_stop_cancels_a_silent_tls_handshake(start):
    with silent_listener() as (address, _):
        channel = start(f"https://{address.authority}")
        threading.Event().wait(0.1)
        stop_in_time(channel)
