"""The apprise sink with the real library and its ``json://`` service on the loopback interface."""

import base64
import email
import email.policy
import http.server
import json
import logging
import socketserver
import subprocess
import sys
import threading

import pytest

from bridge.cli.init import recipe
from bridge.config.loader import read
from bridge.sink import DeliveryFailed
from bridge.testing.records import sample_event, sample_record
from sinks.apprise import AppriseConfig, AppriseSink
from sinks.sentence import sentence

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [
    pytest.mark.interop,
    # The plugins of the library cause these warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
pytest.importorskip("apprise", reason="the extra [apprise] is not installed")


class Peer:
    """An HTTP endpoint that responds with the status of the path in `statuses`, or not at all for 0."""

    def __init__(self):
        self.statuses = {}
        self.got = []
        self.release = threading.Event()
        peer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.partition("?")[0]
                peer.got.append((path, body))
                status = peer.statuses.get(path, 200)
                if status == 0:
                    peer.release.wait(60)
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"hush: you sent pa55word")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def url(self, path):
        return f"json://me:pa55word@127.0.0.1:{self.server.server_port}{path}"

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()


def sink_for(path, *urls, timeout_seconds=5.0):
    (path / "urls").write_text("\n".join(urls))
    return AppriseSink(AppriseConfig(urls_file=str(path / "urls"), timeout_seconds=timeout_seconds))


def failure(sink, number=1):
    with pytest.raises(DeliveryFailed) as caught:
        sink.send([sample_record(number)])
    return caught.value


def test_message_arrives_unchanged(peer, tmp_path):
    record = sample_record(event=sample_event(event_type="Preempt", description="<b>*bold*</b> & \\n {x} ☃"))
    sink = sink_for(tmp_path, peer.url("/a"))
    sink.check()
    assert peer.got == []
    sink.send([record])
    ((path, body),) = peer.got
    assert path.rstrip("/") == "/a"
    assert (body["title"], body["type"]) == ("Preempt scheduled: WestNO_0", "failure")
    assert body["message"] == sentence(record)


def test_failure_has_a_reason_and_only_the_failed_url_is_retried(peer, tmp_path, caplog):
    sink = sink_for(tmp_path, peer.url("/good"), peer.url("/bad"))
    peer.statuses = {"/bad": 401, "/bad/": 401}
    with caplog.at_level(logging.INFO):
        error = failure(sink)
    assert error.needs_attention
    assert "error=401" in str(error)
    peer.statuses = {"/bad": 503, "/bad/": 503}
    error = failure(sink)
    assert not error.needs_attention
    assert "error=503" in str(error)
    peer.statuses = {}
    sink.send([sample_record()])
    assert sorted(path.rstrip("/") for path, _ in peer.got) == ["/bad"] * 3 + ["/good"]
    for text in (str(error), caplog.text):
        assert "pa55word" not in text


def test_check_config_warns_about_the_apprise_throttle(tmp_path, agent_env):
    (tmp_path / "urls").write_text("json://me:pa55word@127.0.0.1:9/\nmailto://me:pa55word@example.net\n")
    (tmp_path / "urls").chmod(0o600)
    config = tmp_path / "config.toml"
    config.write_text(
        f'[state]\ndirectory = "{tmp_path}/state"\n[[sinks]]\ntype = "apprise"\nurls_file = "{tmp_path}/urls"\n'
    )
    argv = [sys.executable, "-m", "bridge", "check-config", "-c", str(config)]
    done = subprocess.run(argv, env=agent_env, capture_output=True, text=True, timeout=60, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Warning: ")]
    assert "waits 5.5 s between two messages to URL 2 (E-Mail)" in line
    assert "pa55word" not in done.stdout + done.stderr


class Mailbox(socketserver.StreamRequestHandler):
    """A mail server that accepts mails of an authenticated user."""

    def handle(self):
        self._say("220 smtp.example.net ESMTP")
        is_known = False
        while line := self.rfile.readline().decode().strip():
            verb = line.partition(" ")[0].upper()
            if verb == "EHLO":
                self._say("250-smtp.example.net\r\n250 AUTH PLAIN")
            elif verb == "AUTH":
                is_known = base64.b64decode(line.split(" ")[2]) == b"\0user\0secret"
                self._say("235 known" if is_known else "535 unknown")
            elif verb in {"MAIL", "RCPT"}:
                self._say("250 taken" if is_known else "530 log in first")
            elif verb == "DATA":
                self._say("354 go on")
                lines = iter(self.rfile.readline, b".\r\n")
                self.server.mails.append(email.message_from_bytes(b"".join(lines), policy=email.policy.default))
                self._say("250 taken")
            else:
                self._say("221 bye")
                return

    def _say(self, line):
        self.wfile.write(f"{line}\r\n".encode())


def test_mail_recipe_sends_one_mail(tmp_path):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mailbox) as server:
        server.mails = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        (tmp_path / "mail-url").write_text(
            f"mailto://user:secret@{address}?to=oncall@example.net&from=azure@example.net&mode=insecure"
        )
        text = recipe("apprise:mail").replace("/etc/scheduled-events-bridge", str(tmp_path))
        [settings] = read(tomllib.loads(text)).sinks
        sink = settings.build()
        sink.send([sample_record()])
        sink.close()
        server.shutdown()
        [mail] = server.mails
    assert (mail["To"], "azure@example.net" in mail["From"]) == ("oncall@example.net", True)
    assert sentence(sample_record()) in mail.get_body(("plain", "html")).get_content()
