"""A call ends by its deadline with any peer, and leaks no thread and no socket."""

import socket
import ssl
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import pytest
import requests
import trustme
from closing import closing_each
from leaks import nothing_left_behind
from slow_peer import (
    NEVER_FINISHING,
    OK,
    SlowPeer,
    answer,
    drip_body,
    drip_body_until_close,
    drip_chunks,
    drip_header,
    hear_and_say_nothing,
    never_read,
    responding,
    silent,
)

from bridge.errors import DeadlineExceeded
from bridge.http.retry_after import retry_after_seconds
from bridge.http.session import DeadlineSession, ResponseUnread
from bridge.testing.watching import in_time

DEADLINE = 0.4


@pytest.fixture
def start():
    with closing_each(SlowPeer) as start:
        yield start


@pytest.fixture
def session():
    with DeadlineSession() as each:
        yield each


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The file of an authority, and the context of a server for 127.0.0.1."""
    file = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return file, context


def cut(call):
    """Let *call* exceed its deadline."""
    with pytest.raises(DeadlineExceeded):
        call()


def cut_in_time(call):
    """Let *call* exceed DEADLINE, by a tenth of it at most."""
    in_time(lambda: cut(call), deadline_seconds=DEADLINE)


@pytest.mark.parametrize("behaviour", NEVER_FINISHING, ids=lambda each: each.__name__)
def test_call_to_a_peer_that_never_finishes_ends_at_the_deadline(start, session, behaviour):
    peer = start(behaviour)
    cut_in_time(lambda: session.request("POST", peer.url, data=b"x", deadline_seconds=DEADLINE))


def test_call_to_a_peer_that_never_reads_ends_at_the_deadline(start, session):
    peer = start(never_read)
    body = b"x" * 30_000_000
    cut_in_time(lambda: session.request("POST", peer.url, data=body, deadline_seconds=DEADLINE))


def test_silent_tls_handshake_ends_at_the_deadline(start, session, certificate):
    file, _context = certificate  # reading 150 certificates would dominate the measurement on a busy machine
    url = f"https://127.0.0.1:{start(silent).port}/"
    cut_in_time(lambda: session.request("GET", url, verify=str(file), deadline_seconds=DEADLINE))


@pytest.mark.parametrize("behaviour", [drip_header, drip_body_until_close, drip_chunks], ids=lambda each: each.__name__)
def test_deadline_applies_under_tls(start, session, certificate, behaviour):
    file, context = certificate

    def under_tls(peer, connection, number):
        with context.wrap_socket(connection, server_side=True) as wrapped:
            behaviour(peer, wrapped, number)

    url = f"https://127.0.0.1:{start(under_tls).port}/"
    cut_in_time(lambda: session.request("GET", url, verify=str(file), deadline_seconds=DEADLINE))


def test_a_connection_under_tls_is_kept_between_calls(start, session, certificate):
    file, context = certificate

    def under_tls(peer, connection, number):
        with context.wrap_socket(connection, server_side=True) as wrapped:
            answer(peer, wrapped, number)

    peer = start(under_tls)
    session.verify = str(file)
    for _ in range(3):
        url = f"https://127.0.0.1:{peer.port}/"
        assert session.request("GET", url, deadline_seconds=20).content == b"ok"
    assert peer.accepted == 1


def test_each_address_of_a_host_is_tried_until_one_responds(start, session):
    url = start(answer).url.replace("127.0.0.1", "localhost")
    assert session.request("GET", url, deadline_seconds=20).content == b"ok"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("behaviour", [silent, drip_body], ids=lambda each: each.__name__)
def test_twenty_consecutive_timeouts_leak_no_thread_and_no_socket(start, session, behaviour, certificate):
    session.verify = str(certificate[0])  # reading the bundle of requests takes longer than this deadline
    cut(lambda: session.request("GET", start(silent).url, deadline_seconds=0.05))  # starts the watchdog
    taken = []
    with nothing_left_behind():
        peer = start(behaviour)
        url = peer.url if behaviour is not silent else f"https://127.0.0.1:{peer.port}/"
        for _ in range(20):
            began = time.monotonic()
            cut(lambda: session.request("GET", url, deadline_seconds=0.1))
            taken.append(time.monotonic() - began)
        session.close()
        peer.close()
    assert median(taken) < 0.1 * 1.1 + 0.15  # a busy machine delays some calls, but a defect would delay every call


def test_call_after_a_timeout_uses_a_new_connection(start, session):
    def first_silent(peer, connection, number):
        (silent if number == 1 else answer)(peer, connection, number)

    peer = start(first_silent)
    cut(lambda: session.request("GET", peer.url, deadline_seconds=DEADLINE))
    assert session.request("GET", peer.url, deadline_seconds=20).content == b"ok"
    assert peer.accepted == 2


def wait_in_vain(session, url):
    with pytest.raises(requests.ConnectionError, match="closed"):
        session.request("GET", url, deadline_seconds=60)


def test_long_deadline_does_not_delay_a_short_deadline_of_another_thread(start):
    peer = start(hear_and_say_nothing)
    with DeadlineSession() as patient, DeadlineSession() as hurried:
        waiting = threading.Thread(target=wait_in_vain, args=(patient, peer.url))
        waiting.start()
        peer.requests.get(timeout=10)
        cut_in_time(lambda: hurried.request("GET", peer.url, deadline_seconds=DEADLINE))
        assert waiting.is_alive()
        patient.close()
        waiting.join(10)
        assert not waiting.is_alive()


def test_a_connection_closed_while_idle_is_replaced_even_for_a_post(start, session):
    closed = threading.Event()

    def once(peer, connection, _):
        peer.read_request(connection)
        connection.sendall(OK)
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    peer = start(once)
    session.request("POST", peer.url, data=b"1", deadline_seconds=20)
    assert closed.wait(10)
    assert session.request("POST", peer.url, data=b"2", deadline_seconds=20).content == b"ok"
    assert peer.accepted == 2


@pytest.mark.parametrize("framing", [b"Content-Length: 5000", b"Connection: close"])
def test_body_over_the_limit_is_rejected(start, session, framing):
    url = start(responding(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + b"x" * 5000)).url
    with pytest.raises(ResponseUnread, match="4999"):
        session.request("GET", url, deadline_seconds=5, max_body_bytes=4999)
    session.close()  # because the server can close this connection at any time
    assert len(session.request("GET", url, deadline_seconds=5, max_body_bytes=5000).content) == 5000


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "identity, br", "unheard-of"])
def test_compressed_body_is_rejected_before_it_is_read(start, session, coding):
    def promise(peer, connection, _):
        peer.read_request(connection)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: 1000\r\n\r\n".encode())
        connection.recv(1)  # the body is never sent: a session that reads it waits until the deadline

    with pytest.raises(ResponseUnread) as refused:
        session.request("GET", start(promise).url, deadline_seconds=20)
    assert (refused.value.response.status_code, refused.value.response.content) == (200, b"")


def test_compression_is_not_requested(start, session):
    peer = start(answer)
    session.request("GET", peer.url, deadline_seconds=20)
    assert b"accept-encoding: identity" in peer.requests.get(timeout=10).lower()


def test_configured_proxy_is_used_with_the_same_deadline(start, session):
    proxy = start(answer)
    proxies = {"http": f"http://127.0.0.1:{proxy.port}", "https": f"http://127.0.0.1:{start(silent).port}"}
    assert session.request("GET", "http://example.invalid/x", proxies=proxies, deadline_seconds=20).content == b"ok"
    assert proxy.requests.get(timeout=10).startswith(b"GET http://example.invalid/x ")
    url = "https://example.invalid/"
    cut_in_time(lambda: session.request("GET", url, proxies=proxies, deadline_seconds=DEADLINE))


def test_error_message_hides_secrets_of_the_url(start, session):
    url = start(silent).url.replace("http://", "http://user:hunter2@") + "/hunter2?sig=hunter2"
    with pytest.raises(DeadlineExceeded) as caught:
        session.request("GET", url, deadline_seconds=0.05)
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan")])
def test_call_without_a_finite_deadline_is_rejected(session, deadline):
    with pytest.raises(ValueError, match="deadline_seconds"):
        session.request("GET", "http://127.0.0.1/", deadline_seconds=deadline)


def test_send_of_requests_is_rejected_because_it_has_no_deadline(session):
    prepared = session.prepare_request(requests.Request("GET", "http://127.0.0.1:9/"))
    with pytest.raises(TypeError, match="has no deadline"):
        session.send(prepared)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("Fri, 20 Nov 2026 11:01:00 GMT", 60),
        ("Fri, 20 Nov 2026 10:00:00 GMT", 0),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("\u0662", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(text, seconds):
    now = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
    assert retry_after_seconds({"Retry-After": text}, now=now) == seconds
