"""The sample nginx configuration for a proxy in front of the portal, with nginx and a running portal."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import uuid

import pytest
import requests
from held_port import held_port
from private_ca import PrivateCa

pytest.importorskip("sqlalchemy", reason="the extra [portal] is not installed")

from fleet_records import fleet_record
from portal_kit import AGENT_TOKEN, RunningPortal
from signed_decisions import sign_decision

from bridge.approval.signing import generate_key
from bridge.clock import REAL_CLOCK
from bridge.portal.command import add_user

pytestmark = pytest.mark.deploy

PASSWORD = "correct horse battery"  # of a test
SECONDS = 20
VM_ID = str(uuid.UUID(int=7))


@pytest.fixture(scope="module")
def portal(tmp_path_factory):
    directory = tmp_path_factory.mktemp("portal")
    pair = generate_key(directory / "ops.key")
    keys = [{"kid": "ops", "approver": "ada", "public_key_file": str(pair.public_key_file)}]
    header = {"proxy_header": "X-Forwarded-User", "proxy_addresses": ["127.0.0.1"]}
    with RunningPortal(directory, keys=keys, people=header) as running:
        running.key = pair.private_key_file
        config = directory / "portal.toml"
        config.write_text(f'[database]\nfile = "{directory}/portal.db"\n[agents]\ntoken_env = "NONE"\n')
        add_user(config, "ann", password=PASSWORD, role="approver", scope=())
        yield running


@pytest.fixture(scope="module")
def proxy(tool, deploy, portal, tmp_path_factory):
    """Return a proxy with the sample configuration, on a free port and with a test certificate."""
    directory = tmp_path_factory.mktemp("nginx")
    ca = PrivateCa(directory / "ca")
    files = ca.issue("localhost")
    with held_port() as port:
        text = (deploy / "portal/nginx.conf").read_text()
        for said, here in {
            "127.0.0.1:8443": f"127.0.0.1:{portal.portal.address[1]}",
            "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
            "/etc/ssl/portal/tls.crt": str(files.cert_file),
            "/etc/ssl/portal/tls.key": str(files.key_file),
        }.items():
            assert text.count(said) == 1, said
            text = text.replace(said, here)
        text = re.sub(r"(?m)^ *listen \[::\].*\n", "", text)
        (directory / "portal.conf").write_text(text)
        kept = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
        (directory / "nginx.conf").write_text(
            f"pid {directory}/pid;\nerror_log {directory}/error.log;\nworker_processes 1;\ndaemon off;\n"
            f"{'user root;' if os.geteuid() == 0 else ''}\nevents {{ worker_connections 256; }}\n"
            f"http {{\naccess_log off;\nclient_body_temp_path {directory}/body;\n{kept}"
            f"include {directory}/portal.conf;\n}}\n"
        )
        command = [tool("nginx"), "-p", directory, "-c", directory / "nginx.conf", "-e", directory / "error.log"]
        judged = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=30, check=False)
        assert judged.returncode == 0, judged.stderr
        assert "warn" not in judged.stderr
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield _Proxy(port, ca)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


class _Proxy:
    def __init__(self, port, ca):
        self.port = port
        self.url = f"https://localhost:{port}"
        self.ca_file = str(ca.ca_file)

    def get(self, path, **more):
        return requests.get(f"{self.url}{path}", verify=self.ca_file, timeout=SECONDS, **more)

    def raw(self, request, until):
        """Send *request* and return the response up to the part that contains *until*."""
        context = ssl.create_default_context(cafile=self.ca_file)
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.sendall(request.encode())
            said = b""
            while until not in said:
                part = secure.recv(4096)
                if not part:
                    break
                said += part
            return said


def _wait_for(port):
    give_up_at = time.monotonic() + SECONDS
    while time.monotonic() < give_up_at:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("nginx does not listen")


@pytest.fixture(scope="module")
def browser(proxy):
    """Return the session of a user who signed in through the proxy."""
    session = requests.Session()
    session.trust_env = False  # otherwise a CA bundle from the environment takes precedence
    session.verify = proxy.ca_file
    answer = session.post(
        f"{proxy.url}/login",
        data={"name": "ann", "password": PASSWORD, "next": "/"},
        headers={"Origin": proxy.url},
        timeout=SECONDS,
    )
    assert answer.status_code == 200, answer.text
    assert "ann" in answer.text
    return session


def test_user_can_sign_in_through_the_proxy(browser, proxy):
    assert browser.get(f"{proxy.url}/agents", timeout=SECONDS).status_code == 200


def test_proxy_discards_the_user_header_of_a_client(proxy, portal):
    header = {"X-Forwarded-User": "ann"}
    answer = proxy.get("/", headers=header, allow_redirects=False)
    assert (answer.status_code, answer.headers["Location"].partition("?")[0]) == (303, "/login")
    for name in ("x-forwarded-user", "X-FORWARDED-USER"):
        assert proxy.get("/", headers={name: "ann"}, allow_redirects=False).status_code == 303
    direct = portal.url.removesuffix("/api/v1")
    assert requests.get(direct, headers=header, timeout=SECONDS, allow_redirects=False).status_code == 200


def test_proxy_does_not_buffer_the_live_stream(browser, proxy):
    with browser.get(f"{proxy.url}/live", stream=True, timeout=SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        began = next(answer.iter_content(None))
    assert b"event: changed" in began


def test_decision_reaches_a_waiting_agent_immediately(proxy, portal):
    path = f"/api/v1/vms/{VM_ID}/decisions"
    headers = {"Authorization": f"Bearer {AGENT_TOKEN}"}
    bring = _Bringing(portal)
    bring.one()
    index = proxy.get(f"{path}?index=0&wait=30", headers=headers).json()["index"]
    assert index
    timer = threading.Timer(0.3, bring.one)
    timer.start()
    answer = proxy.get(f"{path}?index={index}&wait=600", headers=headers)
    timer.join()
    assert len(answer.json()["decisions"]) == 1
    assert answer.json()["index"] > index


class _Bringing:
    def __init__(self, portal):
        self._portal = portal

    def one(self):
        """Send a decision for the VM."""
        token = sign_decision(
            self._portal.key,
            kid="ops",
            approver="ada",
            vm_id=VM_ID,
            event=fleet_record(0).event,
            decision="hold",
            now=REAL_CLOCK.now(),
            valid_seconds=3600,
            jti=str(uuid.uuid4()),
        )
        answer = requests.post(
            f"{self._portal.url}/decisions", data=json.dumps({"decisions": [token]}), timeout=SECONDS
        )
        assert answer.status_code == 200, answer.text


def test_proxy_and_portal_have_the_same_body_limit(proxy):
    headers = {"Authorization": f"Bearer {AGENT_TOKEN}", "Content-Type": "application/cloudevents-batch+json"}

    def status_of(size):
        body = b"[" + b" " * (size - 2) + b"]"
        url = f"{proxy.url}/api/v1/records"
        return requests.post(url, data=body, headers=headers, verify=proxy.ca_file, timeout=SECONDS).status_code

    assert status_of(1024 * 1024) != 413
    assert status_of(1024 * 1024 + 1) == 413


def test_wrong_passwords_of_one_client_do_not_block_another(proxy, portal):
    """The portal counts by the client address from the proxy and ignores the address that the client sends."""
    said = {"X-Forwarded-For": "203.0.113.7", "Origin": proxy.url}
    for _ in range(3):
        form = {"name": "nobody", "password": "a wrong password", "next": "/"}
        answer = requests.post(f"{proxy.url}/login", data=form, headers=said, verify=proxy.ca_file, timeout=SECONDS)
        assert answer.status_code == 401, answer.text
    direct = portal.url.removesuffix("/api/v1")
    for address, status in (("127.0.0.1", 429), ("203.0.113.7", 401)):
        for number in range(3):
            form = {"name": f"guess{number}", "password": "a wrong password", "next": "/"}
            headers = {"X-Forwarded-For": address, "Origin": direct}
            answer = requests.post(f"{direct}/login", data=form, headers=headers, timeout=SECONDS)
        assert answer.status_code == status, answer.text
