"""The server: the operator listener, TLS, reasons not to start, and a stop within the grace period."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from datetime import timedelta

import pytest
import requests
from fleet_records import fleet_record
from portal_kit import AGENT_TOKEN, STRUCTURED, RunningPortal, portal_config, portal_table
from private_ca import PrivateCa

from bridge.clock import REAL_CLOCK
from bridge.errors import BridgeError, ConfigurationError
from bridge.portal.serve import Portal
from bridge.portal.settings import check_secrets, read
from sinks.cloudevent import cloud_event_bytes

OIDC = {
    "issuer": "https://login.example.net",
    "client_id": "portal",
    "groups": [{"group": "ops", "role": "viewer"}],
}


@pytest.fixture
def portal(tmp_path):
    with RunningPortal(tmp_path) as running:
        yield running


def test_portal_does_not_start_without_its_configured_secrets(tmp_path):
    table = portal_table(tmp_path)
    (tmp_path / "agents").unlink()
    (tmp_path / "readers").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigurationError) as refused:
        Portal(read(table)).run()
    said = str(refused.value)
    assert all(name in said for name in ("agents.token_file", "readers.token_file")), said
    assert not (tmp_path / "portal.db").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a mode contains no access lists")
@pytest.mark.parametrize(
    ("section", "key", "rest"),
    [
        ("agents", "token_file", {}),
        ("agents", "webhook_secret_file", {}),
        ("agents.attested", "secret_file", {"subscriptions": [str(uuid.UUID(int=1))]}),
        ("readers", "token_file", {}),
        ("database", "password_file", {"url": "postgresql://portal@127.0.0.1/portal"}),
        ("people.oidc", "client_secret_file", OIDC),
        ("server", "key_file", {"cert_file": "/cert.pem"}),
    ],
)
def test_secret_file_that_other_users_can_read_is_rejected(tmp_path, section, key, rest):
    table = portal_table(tmp_path, people={"origin": "https://portal.example.net"})
    table["database"] = {} if section == "database" else table["database"]
    secret = tmp_path / "secret"
    secret.write_text("whsec_dGhpcyBpcyBhIHNlY3JldCBvZiBlbm91Z2ggYnl0ZXM=\n", encoding="utf-8")
    secret.chmod(0o644)
    inner = table
    for name in section.split("."):
        inner = inner.setdefault(name, {})
    inner.update(rest, **{key: str(secret)})
    with pytest.raises(ConfigurationError, match=rf"{section}.{key}: .*other users can read it.*chmod o-r"):
        check_secrets(read(table))


def test_health_needs_no_token_and_is_only_on_the_operator_listener(portal):
    assert requests.get(f"{portal.operator_url}/healthz", timeout=20).json() == {"status": "ok"}
    assert requests.get(f"{portal.operator_url}/readyz", timeout=20).json() == {"status": "ready"}
    public = portal.url.removesuffix("/api/v1")
    assert requests.get(f"{public}/metrics", timeout=20).status_code == 404
    assert requests.get(f"{portal.operator_url}/api/v1/events", timeout=20).status_code == 404


def test_metrics_count_records_events_and_responses_by_route(portal):
    portal.send(fleet_record(0), fleet_record(1))
    portal.get("/events/a-name-of-an-event")
    page = portal.metrics()
    for line in (
        "scheduled_events_portal_records_total 2.0",
        "scheduled_events_portal_vms 2.0",
        "scheduled_events_portal_open_events 1.0",
        'scheduled_events_portal_events{decision="undecided"} 1.0',
        'scheduled_events_portal_events{decision="held"} 0.0',
        'scheduled_events_portal_requests_total{route="records",status="204"} 1.0',
        'scheduled_events_portal_requests_total{route="event",status="404"} 1.0',
    ):
        assert line in page.splitlines()
    assert "a-name-of-an-event" not in page


@pytest.mark.parametrize(("minutes", "count"), [(8, 1), (12, 0)])
def test_metrics_count_undecided_events_that_start_in_less_than_10_minutes(portal, minutes, count):
    portal.send(fleet_record(0, not_before=REAL_CLOCK.now() + timedelta(minutes=minutes)))
    assert f"scheduled_events_portal_undecided_soon_events {count:.1f}" in portal.metrics().splitlines()


def test_operator_listener_on_loopback_rejects_foreign_host_names(portal):
    answer = requests.get(f"{portal.operator_url}/metrics", headers={"Host": "evil.example"}, timeout=20)
    assert answer.status_code == 421


def test_missing_database_does_not_affect_healthz(portal, tmp_path):
    for path in tmp_path.glob("portal.db*"):
        path.unlink()
    (tmp_path / "portal.db").mkdir()  # so that no file can replace it
    answer = requests.get(f"{portal.operator_url}/readyz", timeout=20)
    assert answer.status_code in {200, 503}  # open connections still use the deleted file
    assert requests.get(f"{portal.operator_url}/healthz", timeout=20).status_code == 200


def test_portal_accepts_records_over_tls(tmp_path):
    ca = PrivateCa(tmp_path / "ca")
    files = ca.issue("localhost")
    files.key_file.chmod(0o600)
    with RunningPortal(tmp_path, server={"cert_file": str(files.cert_file), "key_file": str(files.key_file)}) as portal:
        answer = requests.post(
            portal.url.replace("http:", "https:") + "/records",
            data=cloud_event_bytes(fleet_record(0)),
            headers={"Content-Type": STRUCTURED, "Authorization": f"Bearer {AGENT_TOKEN}"},
            verify=str(ca.ca_file),
            timeout=20,
        )
        assert answer.status_code == 204


def test_occupied_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BridgeError, match=f"operator.listen: cannot listen on {listen}"):
            Portal(read(portal_table(tmp_path, operator={"listen": listen}))).run()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no systemd")
def test_systemd_is_notified_when_the_portal_is_ready(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with RunningPortal(tmp_path) as portal:
            told = systemd.recv(1000).decode().splitlines()
            assert told == ["READY=1", f"STATUS=Serving {portal.url.removesuffix('/api/v1')}"]
            assert requests.get(f"{portal.operator_url}/readyz", timeout=20).status_code == 200
            assert "NOTIFY_SOCKET" not in os.environ


def test_command_serves_and_stops_within_five_seconds_of_a_signal(tmp_path, agent_env):
    config = portal_config(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge", "portal", "--config", str(config), "--log-format", "text"],
        env=agent_env,
        stderr=subprocess.PIPE,
        text=True,
    )
    held = socket.socket()
    try:
        before = []
        for line in process.stderr:
            if "The portal is up" in line:
                break
            before.append(line)
        assert [other for other in before if "alembic" in other] == []
        assert re.search(r" operator=127\.0\.0\.1:\d+ ", line)
        port = int(line.partition("url=http://127.0.0.1:")[2].split()[0])
        held.connect(("127.0.0.1", port))
        held.sendall(
            f"POST /api/v1/records HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {AGENT_TOKEN}\r\n"
            "Content-Length: 10\r\n\r\n{".encode()
        )
        time.sleep(0.2)  # wait until the request has arrived
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - began < 5
    finally:
        held.close()
        process.kill()
        process.wait()
        process.stderr.close()
    assert (tmp_path / "state/portal.db").stat().st_mode & 0o077 == 0 or os.name == "nt"
