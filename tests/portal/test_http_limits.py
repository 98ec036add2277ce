"""Clients that keep to no rule: what they send is refused, costs a bounded amount, and harms nobody else."""

from __future__ import annotations

import gc
import os
import re
import select
import socket
import sys
import time
from pathlib import Path

import pytest
import requests
from fleet_records import vm_id_of
from portal_kit import AGENT_TOKEN, STRUCTURED, RunningPortal

from bridge.portal.http_limits import HttpLimits
from bridge.portal.requests import MAX_BODY_BYTES

SECONDS = 30.0
LIMITS = HttpLimits(request_seconds=1.0)
AS_AGENT = f"Authorization: Bearer {AGENT_TOKEN}\r\n"
EVENTS = b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def portal(tmp_path_factory):
    with RunningPortal(tmp_path_factory.mktemp("portal"), limits=LIMITS) as running:
        yield running


@pytest.fixture
def client(portal):
    with Client(portal) as client:
        yield client


class Client:
    """A connection; what comes is read to its end."""

    def __init__(self, portal):
        self.socket = socket.create_connection(portal.portal.address, timeout=SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """Send *data*; return whether the other side still takes something."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def rest(self):
        """Return all that comes until the connection ends, which it must."""
        found = b""
        try:
            while more := self.socket.recv(65_536):
                found += more
        except ConnectionResetError:
            pass
        return found

    def is_ended(self):
        """Return whether the connection has ended by now; what came before that is passed over."""
        try:
            while select.select([self.socket], [], [], 0)[0]:
                if not self.socket.recv(65_536):
                    return True
        except ConnectionResetError:
            return True
        return False

    def drip(self, data, pause=0.05):
        """Send *data* again and again until the connection is ended; return False when it never is."""
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


def wait_for(what, seconds=SECONDS):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


# The head of a request.


@pytest.mark.parametrize(
    "head", [b"GET /api/v1/events?", b"GET /api/v1/events HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX"]
)
def test_a_head_without_an_end_is_refused_long_before_its_end(portal, client, head):
    before = cut_by(portal)
    sent = 0
    client.send(head)
    while sent < 64 * 1024 * 1024 and client.send(b"y" * 65_536):
        sent += 65_536
    assert sent < 32 * 1024 * 1024  # what the system keeps on the way is not ours
    wait_for(lambda: cut_by(portal) == before + 1)


def test_a_head_of_a_few_kilobytes_is_taken(client):
    client.send(EVENTS[:-2] + b"X: " + b"y" * 30_000 + b"\r\nConnection: close\r\n\r\n")
    assert statuses(client.rest()) == [401]


@pytest.mark.parametrize("head", [b"", b"GET /api/v1/ev", EVENTS[:-1]])
def test_a_connection_that_asks_nothing_is_ended(client, head):
    client.send(head)
    assert statuses(client.rest()) == []


def test_a_head_that_drips_is_given_up(client):
    client.send(EVENTS[:-2])
    assert client.drip(b"X: y\r\n")


def test_half_open_connections_are_all_ended_and_keep_nobody_out(portal):
    clients = [Client(portal) for _ in range(100)]
    for client in clients[::2]:
        client.send(b"POST /api/v1/records HTTP/1.1\r\n")
    assert portal.get("/events").status_code == 200
    before = cut_by(portal)
    wait_for(lambda: all(client.is_ended() for client in clients))
    assert cut_by(portal) >= before
    for client in clients:
        client.socket.close()


# Its body.


@pytest.mark.parametrize("path", ["/api/v1/records", "/api/v1/decisions", "/api/v1/events/x/verdicts", "/login"])
def test_a_mebibyte_and_a_byte_is_too_large_for_every_route(portal, path):
    origin = portal.url.removesuffix("/api/v1")
    headers = {"Authorization": f"Bearer {AGENT_TOKEN}", "Content-Type": STRUCTURED, "Origin": origin}
    answer = requests.post(f"{origin}{path}", data=b" " * (MAX_BODY_BYTES + 1), headers=headers, timeout=SECONDS)
    assert answer.status_code in {401, 403, 413}


def test_chunks_without_an_end_are_given_up(portal, client):
    client.send(f"POST /api/v1/records HTTP/1.1\r\nHost: x\r\n{AS_AGENT}Transfer-Encoding: chunked\r\n\r\n".encode())
    sent = 0
    while sent < 64 * 1024 * 1024 and client.send(b"1000\r\n" + b" " * 0x1000 + b"\r\n"):
        sent += 0x1000
    assert sent < 32 * 1024 * 1024
    assert portal.get("/events").status_code == 200


@pytest.mark.parametrize("length", ["Transfer-Encoding: chunked", "Content-Length: 1000000"])
def test_a_body_that_drips_behind_its_answer_keeps_no_connection(client, length):
    client.send(f"POST /api/v1/records HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())  # 401, whatever it brings
    assert client.drip(b"1\r\n \r\n")


# What is no request, or one that two servers would read differently.

_HEAD = b"POST /api/v1/records HTTP/1.1\r\nHost: x\r\n"
_INNER = b"GET /api/v1/audit HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLED = {
    "length and chunks": _HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + _INNER,
    "chunks and length": _HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + _INNER,
    "two lengths": _HEAD + b"Content-Length: 0\r\nContent-Length: 44\r\n\r\n" + _INNER,
    "lengths in a list": _HEAD + b"Content-Length: 0, 44\r\n\r\n" + _INNER,
    "a length with a sign": _HEAD + b"Content-Length: +0\r\n\r\n" + _INNER,
    "a length below 0": _HEAD + b"Content-Length: -1\r\n\r\n" + _INNER,
    "a length in hexadecimal": _HEAD + b"Content-Length: 0x0\r\n\r\n" + _INNER,
    "a space before the colon": _HEAD + b"Content-Length : 0\r\n\r\n" + _INNER,
    "an encoding that is none": _HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + _INNER,
    "chunks that are not last": _HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + _INNER,
    "a size of a chunk that is none": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n" + _INNER,
    "a size beyond 64 bits": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n" + _INNER,
    "a folded header": _HEAD + b"Content-Length: 0\r\n 4\r\n\r\n" + _INNER,
    "a NUL in a header": _HEAD + b"X: a\0b\r\n\r\n" + _INNER,
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + _INNER,
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", SMUGGLED.values(), ids=SMUGGLED)
def test_what_two_servers_would_read_differently_is_refused_with_all_behind_it(client, request_bytes):
    client.send(request_bytes)
    answers = client.rest()
    assert statuses(answers)[-1:] == [400]
    assert len(statuses(answers)) == 1
    assert b"connection: close" in answers.lower()


def test_another_protocol_is_not_spoken_and_what_is_behind_it_not_read(client):
    client.send(EVENTS[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + EVENTS)
    assert statuses(client.rest()) == [401]


def test_a_request_before_the_response_to_the_previous_one_ends_the_connection(portal):
    before = cut_by(portal)
    poll = f"GET /api/v1/vms/{vm_id_of(0)}/decisions?index=1&wait=600 HTTP/1.1\r\nHost: x\r\n{AS_AGENT}\r\n".encode()
    held = "scheduled_events_portal_held_polls "
    with Client(portal) as client:
        client.send(poll)
        wait_for(lambda: metric(portal, held) == 1)
        client.send(EVENTS)
        assert statuses(client.rest()) == []
    wait_for(lambda: metric(portal, held) == 0)
    assert cut_by(portal) == before + 1


def test_a_poll_with_a_body_is_refused(client):
    poll = f"GET /api/v1/vms/{vm_id_of(0)}/decisions?index=1&wait=600 HTTP/1.1\r\nHost: x\r\n{AS_AGENT}"
    client.send(f"{poll}Transfer-Encoding: chunked\r\n\r\n".encode())
    assert client.drip(b"1\r\n \r\n")


# What is said in a request.


def test_json_that_is_deep_is_refused_wherever_it_comes_and_fails_nothing(portal, caplog):
    deep = "[" * 4_000
    headers = {"Authorization": f"Bearer {AGENT_TOKEN}", "Scheduled-Events-Agent": f'{{"x": {deep}'}
    url = f"{portal.url}/vms/{vm_id_of(0)}/decisions?index=0&wait=1"
    assert requests.get(url, headers=headers, timeout=SECONDS).status_code == 200
    for path in ("/records", "/decisions", "/events/x/verdicts", "/events/x", "/audit"):
        for content_type in (STRUCTURED, "application/json"):
            answer = requests.post(
                f"{portal.url}{path}",
                data=f'{{"decisions": {deep * 50}'.encode(),
                headers={"Authorization": f"Bearer {AGENT_TOKEN}", "Content-Type": content_type},
                timeout=SECONDS,
            )
            assert 400 <= answer.status_code < 500, path
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "path", ["/api/v1/vms/a%2Fdecisions", "/api/v1%2Faudit", "/%2e%2e/api/v1/audit", "//api/v1/audit"]
)
def test_an_encoded_slash_leads_nowhere(client, path):
    client.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert statuses(client.rest()) == [404]


# Ten thousand tokens that are none.


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ten_thousand_bogus_tokens_take_no_memory_and_a_line_or_two_of_the_log(tmp_path, caplog):
    paths = ("records", "events", f"vms/{vm_id_of(0)}/decisions?index=0&wait=1")
    with RunningPortal(tmp_path) as portal, Client(portal) as client:
        _refused(client, paths, range(2_000))
        before = _memory_mb()
        _refused(client, paths, range(2_000, 10_000))
        grown = _memory_mb() - before
        assert metric(portal, 'scheduled_events_portal_callers_refused_total{reason="wrong_token"}') == 10_000
        assert "bogus" not in portal.metrics()
    assert grown < 4
    said = [line for line in caplog.messages if "refused" in line]
    assert 1 <= len(said) <= 2
    assert not any("bogus" in line for line in said)


def _refused(client, paths, numbers):
    """Send one request with a token of its own for each of *numbers*."""
    for number in numbers:
        path = paths[number % 3]
        client.send(
            f"{'POST' if path == 'records' else 'GET'} /api/v1/{path} HTTP/1.1\r\n"
            f"Host: x\r\nContent-Length: 0\r\nAuthorization: Bearer bogus-{number}-{'x' * 200}\r\n\r\n".encode()
        )
        found = b""
        while not found.endswith(b"}"):
            more = client.socket.recv(65_536)
            assert more, found
            found += more
        assert found.startswith(b"HTTP/1.1 401 ")


def _memory_mb():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
