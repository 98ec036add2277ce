"""A request over the connection of the poll ends by its deadline, and leaks no thread and no socket."""

import http.client
import socket
import threading
import time
from pathlib import Path

import pytest
from leaks import nothing_left_behind
from slow_peer import NEVER_FINISHING, OK, SlowPeer, answer, drip_body, hear_and_say_nothing, responding, silent

from bridge.errors import DeadlineExceeded
from bridge.http.connection import DeadlineConnection
from bridge.testing.watching import in_time

DEADLINE = 0.4


@pytest.fixture
def start():
    started = []

    def begin(behaviour, host="127.0.0.1"):
        peer = SlowPeer(behaviour)
        started.append((peer, DeadlineConnection(host, peer.port)))
        return started[-1]

    yield begin
    for peer, connection in started:
        connection.close()
        peer.close()


def get(connection, *, deadline_seconds=20.0, max_body_bytes=1000):
    return connection.request("GET", "/", headers={}, deadline_seconds=deadline_seconds, max_body_bytes=max_body_bytes)


def cut(connection, deadline_seconds=DEADLINE):
    with pytest.raises(DeadlineExceeded):
        get(connection, deadline_seconds=deadline_seconds)


@pytest.mark.parametrize("behaviour", NEVER_FINISHING, ids=lambda each: each.__name__)
def test_request_to_a_server_that_never_finishes_ends_at_the_deadline(start, behaviour):
    _, connection = start(behaviour)
    in_time(lambda: cut(connection), deadline_seconds=DEADLINE)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_twenty_timeouts_leak_no_thread_and_no_socket(start):
    cut(start(silent)[1], 0.05)  # starts the watchdog
    with nothing_left_behind():
        peer, connection = start(drip_body)
        for _ in range(20):
            cut(connection, 0.05)
        connection.close()
        peer.close()


def test_a_connection_is_kept_and_replaced_if_the_server_closed_it(start):
    closed = threading.Event()

    def three_answers(peer, connection, number):
        for _ in range(3 if number == 1 else 1):
            peer.read_request(connection)
            connection.sendall(OK)
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    peer, connection = start(three_answers, host="localhost")
    assert [get(connection).content for _ in range(3)] == [b"ok"] * 3
    assert closed.wait(10)
    assert get(connection).content == b"ok"
    assert peer.accepted == 2


def test_request_after_a_timeout_or_close_uses_a_new_connection(start):
    peer, connection = start(lambda peer, sock, number: (silent if number == 1 else answer)(peer, sock, number))
    cut(connection)
    for _ in range(2):
        assert get(connection).status_code == 200
        connection.close()
    assert peer.accepted == 3


@pytest.mark.parametrize("head", [b"200 OK\r\nContent-Length: 0", b"204 No Content"])
def test_empty_responses_keep_the_connection(start, head):
    def respond(peer, connection, _):
        for _ in range(2):
            peer.read_request(connection)
            connection.sendall(b"HTTP/1.1 " + head + b"\r\n\r\n")

    peer, connection = start(respond)
    assert [get(connection).content for _ in range(2)] == [b"", b""]
    assert peer.accepted == 1


def test_closing_ends_the_request_of_another_thread(start):
    peer, connection = start(hear_and_say_nothing)
    raised = []

    def call():
        try:
            get(connection, deadline_seconds=60)
        except OSError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    peer.requests.get(timeout=10)
    began_at = time.monotonic()
    connection.close()
    thread.join(10)
    assert raised == ["the connection was closed"]
    assert time.monotonic() - began_at < 10


@pytest.mark.parametrize(
    ("head", "body", "reason"),
    [
        (b"Content-Length: 1001", b"x" * 1001, "larger than"),
        (b"Connection: close", b"x" * 5000, "larger than"),
        (b"Content-Encoding: gzip\r\nContent-Length: 2", b"ok", "Content-Encoding"),
    ],
)
def test_a_large_or_compressed_body_is_not_read(start, head, body, reason):
    response = get(start(responding(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body))[1])
    assert (response.status_code, response.content) == (200, b"")
    assert reason in response.unread


def test_a_truncated_body_is_an_error(start):
    _, connection = start(responding(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nok"))
    with pytest.raises(Exception, match="2 bytes read, 498 more expected"):
        get(connection)


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 100 Continue\r\nX-Note: 1\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Sent: Yes\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTRANSFER-ENCODING: Chunked\r\nx-sent:Yes\r\n\r\n1;a=b\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\nX-Sent:  Yes \n\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: two\r\nX-Sent: Yes\r\nno colon\r\n\r\nok",
    ],
    ids=["continue", "chunked", "HTTP/1.0", "length is not a number"],
)
def test_unusual_responses_are_parsed(start, response):
    found = get(start(responding(response))[1])
    assert (found.status_code, found.content, found.headers["x-sent"]) == (200, b"ok", "Yes")


@pytest.mark.parametrize("headers", [b"X-Long: " + b"x" * 70_000, b"X-Many: 1\r\n" * 101], ids=["long", "many"])
def test_too_many_or_too_long_headers_are_an_error(start, headers):
    _, connection = start(responding(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + headers + b"\r\n\r\n"))
    with pytest.raises(http.client.HTTPException, match="more than"):
        get(connection)
