"""What the HTTP sinks share, against real servers: each answer means what the table says, and no secret gets out."""

from __future__ import annotations

import base64
import contextlib
import logging
import queue
import socket
import ssl
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from leaks import nothing_left_behind

from bridge.sink import DeliveryFailed, DeliveryRejected, Secret
from bridge.testing.peers import nobody
from bridge.testing.simulator.http_server import HttpServer
from bridge.testing.simulator.imds_api import Answer, Request
from bridge.testing.watching import in_time
from sinks.http.config import HttpConfig
from sinks.http.endpoint import Endpoint

DEADLINE = 1.0
#: For a peer that answers.
PATIENCE_SECONDS = 30.0
SECRET_PATH = "/services/T0000/B0000/XXXXXXXXSECRETXXXXXXXX"


class Peer:
    """A server that answers as it is told and keeps what it was asked."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.requests: queue.Queue[Request] = queue.Queue()
        self.answer = Answer(status=200, body=b"{}")
        self.connections = 0
        self._server = HttpServer(("127.0.0.1", 0), self._respond, threading.Event())
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._seen: list[Any] = []  # kept alive: the id of one that is gone is soon another's
        self._server.start()
        self.scheme = "http" if tls is None else "https"
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def _respond(self, connection: Any, request: Request) -> None:
        if not any(each is connection for each in self._seen):
            self._seen.append(connection)
            self.connections += 1
        self.requests.put(request)
        connection.write(self.answer)

    def close(self) -> None:
        self._server.close()


class RawPeer:
    """A socket that runs *behaviour* on each connection after its request was read."""

    def __init__(self, behaviour: Any) -> None:
        self._behaviour = behaviour
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.stop = threading.Event()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                with contextlib.suppress(OSError), connection:
                    connection.recv(65536)
                    self._behaviour(self, connection)

    def close(self) -> None:
        self.stop.set()
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join(5)


@pytest.fixture
def peer() -> Iterator[Peer]:
    each = Peer()
    yield each
    each.close()


@pytest.fixture
def raw_peer() -> Iterator[Any]:
    peers: list[RawPeer] = []

    def start(behaviour: Any) -> RawPeer:
        peers.append(RawPeer(behaviour))
        return peers[-1]

    yield start
    for each in peers:
        each.close()


@pytest.fixture
def endpoint() -> Iterator[Any]:
    made: list[Endpoint] = []

    def make(url: str, **keys: Any) -> Endpoint:
        secrets = keys.pop("secrets", ())
        made.append(Endpoint(url, HttpConfig(**{"timeout_seconds": PATIENCE_SECONDS, **keys}), secrets=secrets))
        return made[-1]

    yield make
    for each in made:
        each.close()


def outcome(endpoint: Endpoint) -> tuple[str, frozenset[str]]:
    """Return what a POST came to, in a word, and what was said of it."""
    try:
        endpoint.post(b"{}", {"Content-Type": "application/json"})
    except DeliveryRejected:
        return "parked", frozenset()
    except DeliveryFailed as error:
        said = {name for name in ("needs_attention", "held") if getattr(error, name)}
        return "failed", frozenset(said | ({"retry_after"} if error.retry_after is not None else set()))
    return "delivered", frozenset()


MATRIX = {
    200: ("delivered", set()),
    201: ("delivered", set()),
    202: ("delivered", set()),
    204: ("delivered", set()),
    301: ("failed", {"needs_attention"}),
    302: ("failed", {"needs_attention"}),
    303: ("failed", {"needs_attention"}),
    307: ("failed", {"needs_attention"}),
    308: ("failed", {"needs_attention"}),
    400: ("parked", set()),
    401: ("failed", {"needs_attention"}),
    402: ("parked", set()),
    403: ("failed", {"needs_attention"}),
    404: ("failed", {"needs_attention"}),
    405: ("parked", set()),
    407: ("failed", {"needs_attention"}),
    408: ("failed", set()),
    409: ("parked", set()),
    410: ("failed", {"needs_attention", "held"}),
    413: ("parked", set()),
    415: ("parked", set()),
    421: ("failed", set()),
    422: ("parked", set()),
    423: ("failed", set()),
    425: ("failed", set()),
    429: ("failed", set()),
    431: ("parked", set()),
    500: ("failed", set()),
    501: ("failed", set()),
    502: ("failed", set()),
    503: ("failed", set()),
    504: ("failed", set()),
    520: ("failed", set()),
}


@pytest.mark.parametrize("status", MATRIX)
def test_each_status_means_what_the_table_says(peer: Peer, endpoint: Any, status: int) -> None:
    peer.answer = Answer(status=status, body=b"", headers={"Location": f"{peer.url}/elsewhere"})
    assert outcome(endpoint(f"{peer.url}/here")) == (MATRIX[status][0], frozenset(MATRIX[status][1]))
    asked = [peer.requests.get_nowait().path for _ in range(peer.requests.qsize())]
    # Never followed, never sent twice. What somebody else still sends to the port's last owner does not count.
    assert [path for path in asked if path in ("/here", "/elsewhere")] == ["/here"]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("17", 17.0),
        ("a date in an hour", 3600.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("soon", None),
    ],
)
def test_retry_after_is_handed_on(peer: Peer, endpoint: Any, status: int, text: str, seconds: float | None) -> None:
    if text == "a date in an hour":
        text = format_datetime(datetime.now(timezone.utc) + timedelta(hours=1), usegmt=True)
    peer.answer = Answer(status=status, headers={"Retry-After": text})
    with pytest.raises(DeliveryFailed) as failed:
        endpoint(peer.url).post(b"{}", {})
    assert failed.value.retry_after == (seconds if seconds is None else pytest.approx(seconds, abs=120))


def test_configured_statuses_override_the_table(peer: Peer, endpoint: Any) -> None:
    overridden = endpoint(peer.url, retry_statuses=(400, 410, 202), park_statuses=(503, 401))
    wanted = {400: "failed", 410: "failed", 202: "failed", 503: "parked", 401: "parked"}
    for status, word in wanted.items():
        peer.answer = Answer(status=status)
        assert outcome(overridden)[0] == word


def test_a_redirect_carries_neither_body_nor_token_to_another_host(peer: Peer, endpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("tok-abcdef")
    other = Peer()
    try:
        for status in (301, 302, 303, 307, 308):
            peer.answer = Answer(status=status, headers={"Location": f"{other.url}/hook"})
            with pytest.raises(DeliveryFailed, match=f"points to {other.url}"):
                endpoint(peer.url, bearer_token_file=str(tmp_path / "token")).post(b"{}", {})
        assert other.requests.empty()
    finally:
        other.close()


# No answer.


def test_a_silent_peer_is_left_at_the_deadline(raw_peer: Any, endpoint: Any) -> None:
    def post() -> tuple[str, frozenset[str]]:
        silent = endpoint(raw_peer(lambda peer, _: peer.stop.wait(30)).url, timeout_seconds=DEADLINE)
        return outcome(silent)

    assert in_time(post, deadline_seconds=DEADLINE) == ("failed", set())


def test_a_reset_is_tried_again(raw_peer: Any, endpoint: Any) -> None:
    def reset(_: RawPeer, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    assert outcome(endpoint(raw_peer(reset).url)) == ("failed", set())


def test_a_peer_that_hangs_up_without_a_response_is_tried_again(raw_peer: Any, endpoint: Any) -> None:
    assert outcome(endpoint(raw_peer(lambda *_: None).url)) == ("failed", set())


def test_garbage_instead_of_http_is_tried_again(raw_peer: Any, endpoint: Any) -> None:
    garbage = endpoint(raw_peer(lambda _, connection: connection.sendall(b"220 smtp.example ESMTP\r\n")).url)
    assert outcome(garbage) == ("failed", set())


def test_a_refused_connection_is_certain(endpoint: Any) -> None:
    with nobody() as address:
        assert outcome(endpoint(f"http://{address.authority}")) == ("failed", frozenset())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not drop a SYN when the queue is full")
def test_a_connection_that_is_never_answered_is_certain(endpoint: Any) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # a full queue: further SYNs are dropped
            client = stack.enter_context(socket.socket())
            client.setblocking(False)  # noqa: FBT003  # the shape of socket
            client.connect_ex(listener.getsockname())
        full = endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=DEADLINE)
        assert outcome(full) == ("failed", frozenset())


def test_a_name_that_does_not_exist_is_certain(endpoint: Any) -> None:
    assert outcome(endpoint("http://no-such-host.invalid/", timeout_seconds=5.0)) == ("failed", frozenset())


@pytest.mark.parametrize("host", ["a..b", ".example.invalid", "a" * 70 + ".invalid"])
def test_a_host_name_that_is_none_needs_a_person(endpoint: Any, host: str) -> None:
    assert outcome(endpoint(f"http://{host}/", timeout_seconds=5.0)) == ("failed", {"needs_attention"})


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_connection_that_the_peer_closed_meanwhile_costs_no_failure(raw_peer: Any, endpoint: Any, how: str) -> None:
    def answer_and_hang_up(_: RawPeer, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        if how == "rst":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
        gone.set()

    gone = threading.Event()
    each = endpoint(raw_peer(answer_and_hang_up).url)
    for _ in range(5):
        gone.clear()
        assert outcome(each) == ("delivered", frozenset())
        assert gone.wait(5)


def test_an_answer_that_is_too_long_counts_by_its_status(peer: Peer, endpoint: Any) -> None:
    for status, word in {200: "delivered", 400: "parked", 500: "failed"}.items():
        peer.answer = Answer(status=status, body=b"x" * 200_000)
        assert outcome(endpoint(peer.url))[0] == word


def test_a_body_that_claims_to_be_packed_does_not_hide_the_status(peer: Peer, endpoint: Any) -> None:
    peer.answer = Answer(status=204, headers={"Content-Encoding": "gzip"})
    assert outcome(endpoint(peer.url))[0] == "delivered"
    assert peer.requests.get_nowait().headers["accept-encoding"] == "identity"


# TLS.


def certificate(directory: Path, *, host: str = "127.0.0.1", days: tuple[int, int] = (-1, 1)) -> Path:
    """Return a file with a certificate that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(timezone.utc)
    first, last = (now + timedelta(days=each) for each in days)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), first, last)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    file = directory / f"{host}{days[1]}.pem"
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted)
    file.write_bytes(signed.public_bytes(pem) + private)
    return file


def tls_peer(file: Path, *, client_ca: Path | None = None) -> Peer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return Peer(tls=context)


def test_a_private_authority_is_trusted_by_its_file_alone(endpoint: Any, tmp_path: Path) -> None:
    file = certificate(tmp_path)
    peer = tls_peer(file)
    try:
        assert outcome(endpoint(peer.url, ca_file=str(file), timeout_seconds=5.0)) == ("delivered", frozenset())
        assert outcome(endpoint(peer.url, timeout_seconds=5.0)) == ("failed", {"needs_attention"})
    finally:
        peer.close()


@pytest.mark.parametrize("fault", [{"days": (-3, -1)}, {"host": "127.0.0.2"}], ids=["expired", "another host"])
def test_a_wrong_certificate_needs_a_person(endpoint: Any, tmp_path: Path, fault: dict[str, Any]) -> None:
    file = certificate(tmp_path, **fault)
    peer = tls_peer(file)
    try:
        wrong = endpoint(peer.url, ca_file=str(file), timeout_seconds=5.0)
        assert outcome(wrong) == ("failed", {"needs_attention"})
    finally:
        peer.close()


def test_a_client_certificate_is_shown_and_its_absence_needs_a_person(endpoint: Any, tmp_path: Path) -> None:
    file = certificate(tmp_path)
    peer = tls_peer(file, client_ca=file)
    keys = {"ca_file": str(file), "timeout_seconds": 5.0}
    try:
        assert outcome(endpoint(peer.url, client_cert_file=str(file), **keys))[0] == "delivered"
        word, said = outcome(endpoint(peer.url, **keys))
        assert word == "failed"
        assert "held" not in said
    finally:
        peer.close()


def test_plain_http_behind_an_https_url_needs_a_person(peer: Peer, endpoint: Any) -> None:
    wrong = endpoint(f"https://127.0.0.1:{peer.port}", timeout_seconds=5.0)
    word, said = outcome(wrong)
    assert (word, "needs_attention" in said) == ("failed", True)


def test_a_certificate_file_that_is_gone_needs_a_person(peer: Peer, endpoint: Any, tmp_path: Path) -> None:
    file = certificate(tmp_path)
    late = endpoint(peer.url.replace("http:", "https:"), client_cert_file=str(file))
    file.unlink()
    assert outcome(late) == ("failed", {"needs_attention"})


# Headers, proxies, connections.


def test_headers_come_from_the_configuration_a_file_and_a_token(peer: Peer, endpoint: Any, tmp_path: Path) -> None:
    token, headers = tmp_path / "token", tmp_path / "headers"
    token.write_text("one\n")
    headers.write_text("X-Api-Key: abc:def\n# a comment\nX-Two:  two \n")
    each = endpoint(peer.url, headers={"X-Team": "payments"}, headers_file=str(headers), bearer_token_file=str(token))
    each.post(b"{}", {})
    got = peer.requests.get_nowait().headers
    assert (got["x-team"], got["x-api-key"], got["x-two"]) == ("payments", "abc:def", "two")
    assert got["authorization"] == "Bearer one"
    token.write_text("rotated\n")
    each.post(b"{}", {})
    assert peer.requests.get_nowait().headers["authorization"] == "Bearer rotated"


@pytest.mark.parametrize("line", ["just-a-secret-word", "X-Key: caf\u00e9-secret", "Content-Length: 3", "X Y: secret"])
def test_a_header_that_cannot_be_sent_needs_a_person_and_is_not_shown(
    peer: Peer, endpoint: Any, tmp_path: Path, line: str
) -> None:
    (tmp_path / "headers").write_text(f"{line}\n")
    with pytest.raises(DeliveryFailed, match="headers_file, line 1") as failed:
        endpoint(peer.url, headers_file=str(tmp_path / "headers")).post(b"{}", {})
    assert failed.value.needs_attention
    assert "secret" not in str(failed.value)


def test_a_missing_token_needs_a_person(peer: Peer, endpoint: Any, tmp_path: Path) -> None:
    assert outcome(endpoint(peer.url, bearer_token_file=str(tmp_path / "none"))) == ("failed", {"needs_attention"})
    assert peer.requests.empty()


def test_requests_go_through_the_proxy_and_the_environment_is_not_asked(
    peer: Peer, endpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert outcome(endpoint(peer.url))[0] == "delivered"
    (tmp_path / "proxy").write_text(f"http://me:pass-word@127.0.0.1:{peer.port}\n")
    through = endpoint("http://example.invalid/hook", proxy_file=str(tmp_path / "proxy"))
    assert outcome(through)[0] == "delivered"
    assert "proxy-authorization" in [*peer.requests.queue][-1].headers


def test_a_proxy_that_wants_another_password_needs_a_person(raw_peer: Any, endpoint: Any) -> None:
    refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    proxy = raw_peer(lambda _, connection: connection.sendall(refusal))
    for scheme in ("http", "https"):
        through = endpoint(f"{scheme}://example.invalid/hook", proxy=proxy.url)
        assert outcome(through) == ("failed", {"needs_attention"}), scheme


def test_a_proxy_that_is_down_is_certain(endpoint: Any) -> None:
    for scheme in ("http", "https"):
        through = endpoint(f"{scheme}://example.invalid/hook", proxy="http://127.0.0.1:1")
        assert outcome(through) == ("failed", frozenset()), scheme


def test_one_connection_serves_many_requests(peer: Peer, endpoint: Any) -> None:
    each = endpoint(peer.url)
    for _ in range(20):
        each.post(b"{}", {})
    assert peer.connections == 1


def test_a_connection_that_was_idle_for_long_is_not_trusted(peer: Peer) -> None:
    clock = [0.0]
    each = Endpoint(peer.url, HttpConfig(), monotonic=lambda: clock[0])
    for seconds, connections in ((0.0, 1), (59.0, 1), (61.0, 2), (1.0, 2)):
        clock[0] += seconds
        each.post(b"{}", {})
        assert peer.connections == connections
    each.close()


def test_nothing_is_sent_after_close(peer: Peer, endpoint: Any) -> None:
    each = endpoint(peer.url)
    each.close()
    each.close()
    assert outcome(each)[0] == "failed"
    assert peer.requests.empty()


def test_close_ends_a_request_in_flight(raw_peer: Any, endpoint: Any) -> None:
    entered = threading.Event()

    def hear(peer: RawPeer, _: socket.socket) -> None:
        entered.set()
        peer.stop.wait(30)

    each = endpoint(raw_peer(hear).url, timeout_seconds=30.0)
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(outcome(each)))
    thread.start()
    assert entered.wait(5)
    each.close()
    thread.join(5)
    assert outcomes == [("failed", set())]


# Secrets.


def everything_said(error: BaseException) -> str:
    return "".join([*traceback.format_exception(error), repr(error), str(error)])


@pytest.mark.parametrize("status", [200, 302, 400, 403, 404, 410, 500, "refused", "reset", "silent", "headers"])
def test_no_secret_is_in_an_error_or_a_log_line(  # noqa: PLR0917  # fixtures
    peer: Peer, raw_peer: Any, endpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text("tok-SECRET-token")
    (tmp_path / "headers").write_text("X-Api-Key: key-SECRET-key\nAuthorization-Two: Basic bWU6U0VDUkVU\n")
    (tmp_path / "more").write_text("more-SECRET-1\nmore-SECRET-2\n")
    secrets = ["XXXXXXXXSECRETXXXXXXXX", "sig-SECRET-sig", "tok-SECRET-token", "key-SECRET-key", "bWU6U0VDUkVU"]
    secrets += ["more-SECRET-1", "more-SECRET-2"]
    # In the middle of the cut, too: half a secret is one.
    echo = ("x" * 230 + f" Cannot POST {SECRET_PATH} " + " ".join(secrets)).encode()
    if isinstance(status, int):
        peer.answer = Answer(status=status, body=echo, headers={"Location": f"https://x.invalid{SECRET_PATH}"})
    behaviours = {
        "reset": lambda *_: None,
        "silent": lambda each, _: each.stop.wait(30),
        "headers": lambda _, connection: connection.sendall(b"HTTP/1.1 500 no\r\nbroken header\r\n\r\n"),
        "refused": None,
    }
    url = peer.url if isinstance(status, int) else "http://127.0.0.1:1"
    if behaviours.get(status) is not None:
        url = raw_peer(behaviours[status]).url
    each = endpoint(
        f"{url}{SECRET_PATH}?sig=sig-SECRET-sig",
        bearer_token_file=str(tmp_path / "token"),
        headers_file=str(tmp_path / "headers"),
        secrets=(Secret(key="more", file=str(tmp_path / "more")),),
        timeout_seconds=DEADLINE if status == "silent" else PATIENCE_SECONDS,
    )
    said = ""
    try:
        each.post(b"{}", {})
    except (DeliveryFailed, DeliveryRejected) as error:
        said = everything_said(error)
        assert url in said
    said += caplog.text + repr(each)
    assert not [secret for secret in (*secrets, "SECRET") if secret in said], said


def basic(user_and_password: str) -> str:
    return base64.b64encode(user_and_password.encode("latin-1")).decode()


@pytest.mark.parametrize("pair", ["me:hunter2", "m%C3%A9:hunter%2F2", "x:y", "only-me"])
def test_a_user_and_password_of_the_url_are_masked_as_they_are_sent(peer: Peer, endpoint: Any, pair: str) -> None:
    each = endpoint(peer.url.replace("://", f"://{pair if ':' in pair else pair + ':'}@"))
    assert each.post(b"{}", {}).status_code == 200
    sent = peer.requests.get().headers["authorization"]
    assert sent.startswith("Basic ")
    peer.answer = Answer(status=400, body=f"Authorization: {sent} ({sent.partition(' ')[2]})".encode())
    with pytest.raises(DeliveryRejected) as refused:
        each.post(b"{}", {})
    assert sent.partition(" ")[2] not in everything_said(refused.value)
    assert "Authorization: Basic <secret> (<secret>)" in str(refused.value)


def test_a_user_and_password_of_the_proxy_are_masked_as_they_are_sent(
    peer: Peer, endpoint: Any, tmp_path: Path
) -> None:
    (tmp_path / "proxy").write_text(peer.url.replace("://", "://me:hunter2@"))
    each = endpoint("http://hook.invalid/", proxy_file=str(tmp_path / "proxy"))
    peer.answer = Answer(status=400, body=f"Proxy-Authorization: Basic {basic('me:hunter2')}".encode())
    with pytest.raises(DeliveryRejected, match="Basic <secret>"):
        each.post(b"{}", {})
    assert peer.requests.get().headers["proxy-authorization"] == f"Basic {basic('me:hunter2')}"


@pytest.mark.parametrize("source", ["token", "file", "setting"])
def test_an_explicit_authorization_wins_over_the_urls(peer: Peer, endpoint: Any, tmp_path: Path, source: str) -> None:
    (tmp_path / "token").write_text("one")
    (tmp_path / "file").write_text("authorization: Bearer one\n")
    keys: dict[str, dict[str, Any]] = {
        "token": {"bearer_token_file": str(tmp_path / "token")},
        "file": {"headers_file": str(tmp_path / "file")},
        "setting": {"headers": {"AUTHORIZATION": "Bearer one"}},
    }
    endpoint(peer.url.replace("://", "://me:hunter2@"), **keys[source]).post(b"{}", {})
    assert peer.requests.get().headers["authorization"] == "Bearer one"


@pytest.mark.parametrize("end", ["", "/"])
def test_the_origin_is_shown_whatever_the_url_is(peer: Peer, endpoint: Any, end: str) -> None:
    peer.answer = Answer(status=503, body=b"no", headers={})
    with pytest.raises(DeliveryFailed) as failed:
        endpoint(peer.url + end).post(b"{}", {})
    assert str(failed.value).startswith(f"{peer.url} answered 503")
    peer.answer = Answer(status=302, body=f"see {peer.url}{end}".encode(), headers={"Location": f"{peer.url}/login"})
    with pytest.raises(DeliveryFailed) as failed:
        endpoint(peer.url.replace("://", "://127.0:http@") + end).post(b"{}", {})
    assert str(failed.value).startswith(f"{peer.url} answered 302")
    assert f"It points to {peer.url}." in str(failed.value)


def test_a_connection_reset_before_tls_leaves_no_socket_behind(endpoint: Any) -> None:
    def reset(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

    with warnings.catch_warnings(), socket.create_server(("127.0.0.1", 0)) as listener:
        # ssl leaves it to reference counting to close the socket of a handshake that was reset.
        warnings.filterwarnings("ignore", message="unclosed <ssl.SSLSocket", category=ResourceWarning)
        thread = threading.Thread(target=reset, args=(listener,))
        thread.start()
        each = endpoint(f"https://127.0.0.1:{listener.getsockname()[1]}/", timeout_seconds=5.0)
        assert outcome(each)[0] == "failed"
        with nothing_left_behind():
            assert [outcome(each)[0] for _ in range(20)] == ["failed"] * 20
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
