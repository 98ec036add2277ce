"""Misbehaving HTTP clients: limits for headers, bodies, and connections, without effect on other clients."""

import asyncio
import logging
import re
import select
import socket
import time
from unittest.mock import MagicMock

import pytest
from fleet_records import vm_id_of
from portal_kit import AGENT_TOKEN, RunningPortal
from uvicorn import Config
from uvicorn.server import ServerState
from waiting import until

from bridge.logs import ThrottledLog
from bridge.portal.http_limits import LimitedHttp
from bridge.portal.metrics import PortalMetrics

SECONDS = 30.0
AS_AGENT = f"Authorization: Bearer {AGENT_TOKEN}\r\n"
EVENTS = b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n"
POLL = f"GET /api/v1/vms/{vm_id_of(0)}/decisions?index=1&wait=600 HTTP/1.1\r\nHost: x\r\n{AS_AGENT}\r\n".encode()
NOTHING = EVENTS.replace(b"events", b"nothing")
FIRST_POLL = POLL.replace(b"index=1", b"index=0")  # the response is immediate


@pytest.fixture(scope="module")
def portal(tmp_path_factory):
    with RunningPortal(tmp_path_factory.mktemp("portal"), request_seconds=0.4) as running:
        yield running


@pytest.fixture
def client(portal):
    with Client(portal) as client:
        yield client


class Client:
    """A raw connection to the portal."""

    def __init__(self, portal):
        self.socket = socket.create_connection(portal.portal.address, timeout=SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """Send *data*, and return whether the connection still accepts data."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def rest(self):
        """Return all data until the portal closes the connection."""
        found = b""
        try:
            while more := self.socket.recv(65_536):
                found += more
        except ConnectionResetError:
            pass
        return found

    def response(self):
        """Return one response with a body."""
        with self.socket.makefile("rb") as received:
            head = b""
            while (line := received.readline()) not in {b"\r\n", b""}:
                head += line
            return head + received.read(int(re.search(rb"content-length: (\d+)", head)[1]))

    def is_ended(self):
        """Return whether the connection is closed, and discard the received data."""
        try:
            while select.select([self.socket], [], [], 0)[0]:
                if not self.socket.recv(65_536):
                    return True
        except ConnectionResetError:
            return True
        return False

    def drip(self, data, pause=0.05):
        """Send *data* repeatedly until the connection is closed. Return False if it stays open."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            if self.is_ended() or not self.send(data):
                return True
            time.sleep(pause)
        return False


def statuses(answers):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def metric(portal, start):
    return sum(float(line.rpartition(" ")[2]) for line in portal.metrics().splitlines() if line.startswith(start))


def cut_by(portal):
    return metric(portal, "scheduled_events_portal_connections_cut_total ")


# The header.


@pytest.mark.parametrize(
    "head", [b"GET /api/v1/events?", b"GET /api/v1/events HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX"]
)
def test_endless_header_is_cut_early(portal, client, head):
    before = cut_by(portal)
    sent = 0
    client.send(head)
    while sent < 64 * 1024 * 1024 and client.send(b"y" * 65_536):
        sent += 65_536
    assert sent < 32 * 1024 * 1024  # the buffers of the kernel do not count
    until(lambda: cut_by(portal) == before + 1)


@pytest.mark.parametrize("head", [b"", b"GET /api/v1/ev", EVENTS[:-1]])
def test_idle_connection_without_a_request_is_closed(client, head):
    client.send(head)
    assert statuses(client.rest()) == []


@pytest.mark.parametrize("request_head", [EVENTS, POLL])
def test_slow_header_is_cut(client, request_head):
    client.send(request_head[:-2])
    assert client.drip(b"X: y\r\n")


def test_half_open_connections_are_closed_and_block_no_client(portal):
    clients = [Client(portal) for _ in range(100)]
    for client in clients[::2]:
        client.send(b"POST /api/v1/records HTTP/1.1\r\n")
    assert portal.get("/events").status_code == 200
    before = cut_by(portal)
    until(lambda: all(client.is_ended() for client in clients))
    assert cut_by(portal) >= before
    for client in clients:
        client.socket.close()


# The body.


def test_endless_chunked_body_is_cut(portal, client):
    client.send(f"POST /api/v1/records HTTP/1.1\r\nHost: x\r\n{AS_AGENT}Transfer-Encoding: chunked\r\n\r\n".encode())
    sent = 0
    while sent < 64 * 1024 * 1024 and client.send(b"1000\r\n" + b" " * 0x1000 + b"\r\n"):
        sent += 0x1000
    assert sent < 32 * 1024 * 1024
    assert portal.get("/events").status_code == 200


@pytest.mark.parametrize("length", ["Transfer-Encoding: chunked", "Content-Length: 1000000"])
def test_slow_body_after_the_response_is_cut(client, length):
    client.send(
        f"POST /api/v1/records HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode()
    )  # the response is 401 before the body arrives
    assert client.drip(b"1\r\n \r\n")


# Request smuggling.


@pytest.mark.parametrize("following", [EVENTS, POLL])
def test_pipelined_request_closes_the_connection(portal, following):
    before = cut_by(portal)
    with Client(portal) as client:
        client.send(POLL)
        until(lambda: portal.held_polls() == 1)
        client.send(following)
        assert statuses(client.rest()) == []
    until(lambda: portal.held_polls() == 0)
    assert cut_by(portal) == before + 1


@pytest.mark.parametrize("first", [POLL, FIRST_POLL])
@pytest.mark.parametrize("second", [POLL, POLL[:30], EVENTS])
def test_two_requests_in_one_packet_close_the_connection(portal, client, first, second):
    client.send(first + second)
    assert statuses(client.rest()) == []
    until(lambda: portal.held_polls() == 0)


@pytest.mark.parametrize("is_unread", [False, True])
def test_request_of_a_client_that_reads_no_response_is_cut(is_unread):
    """The buffers of the kernel hide this over a real connection."""

    async def polls_after_request():
        transport, polls, metrics = MagicMock(asyncio.Transport), [], PortalMetrics()
        transport.is_closing.side_effect = lambda: transport.abort.called
        log = ThrottledLog(logging.getLogger(__name__))
        config = Config(MagicMock(), lifespan="off", log_config=None)
        connection = LimitedHttp(
            config=config,
            server_state=ServerState(),
            app_state={},
            request_seconds=SECONDS,
            metrics=metrics,
            log=log,
            polls=polls.append,
        )
        connection.connection_made(transport)
        if is_unread:
            connection.pause_writing()
        connection.data_received(POLL)
        return len(polls), transport.abort.called

    assert asyncio.run(polls_after_request()) == ((0, True) if is_unread else (1, False))


def test_idle_connection_is_closed_despite_an_empty_line(client):
    client.send(FIRST_POLL)
    assert statuses(client.response()) == [200]
    client.send(b"\r\n")
    assert client.rest() == b""


def test_poll_that_offers_an_upgrade_is_answered(client):
    client.send(FIRST_POLL.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost"))
    assert statuses(client.response()) == [200]


# Polls, which do not pass through ASGI.


def test_connection_serves_polls_and_other_requests_by_turns(client):
    for request, status in ((FIRST_POLL, 200), (NOTHING, 404), (FIRST_POLL, 200), (FIRST_POLL, 200)):
        client.send(request)
        assert statuses(client.response()) == [status]


def test_body_of_a_poll_is_refused_and_is_not_the_next_request(client):
    client.send(FIRST_POLL.replace(b"Host", f"Content-Length: {len(EVENTS)}\r\nHost".encode()) + EVENTS)
    assert statuses(client.response()) == [400]
    client.send(FIRST_POLL)
    assert statuses(client.response()) == [200]


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (FIRST_POLL.replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
        (FIRST_POLL.replace(b"Host", b"Connection: close\r\nHost"), 200),
        (FIRST_POLL.replace(b"Bearer ", b"Bearer wrong"), 401),
        (FIRST_POLL.replace(b"GET", b"POST").replace(b"Host", b"Connection: close\r\nHost"), 404),
    ],
)
def test_last_response_of_a_connection_says_so(client, request_head, status):
    client.send(request_head)
    answer = client.rest()
    assert statuses(answer) == [status]
    assert b"connection: close\r\n" in answer
    assert answer.count(b"connection: ") == 1


# The path.


@pytest.mark.parametrize(
    "path", ["/api/v1/vms/a%2Fdecisions", "/api/v1%2Faudit", "/%2e%2e/api/v1/audit", "//api/v1/audit"]
)
def test_encoded_slash_is_not_found(client, path):
    client.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert statuses(client.rest()) == [404]
