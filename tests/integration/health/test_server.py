"""The status listener over real sockets: it responds despite slow clients, and releases its port."""

import logging
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
import requests
from held_port import held_port
from least_time import least
from starved import no_descriptors, no_threads

from bridge.health.server import HealthServer, Response


def page():
    return Response(body=b'{"status":"ok"}\n')


def broken():
    raise RuntimeError("no")


@pytest.fixture
def listener():
    listening = HealthServer("127.0.0.1", 0, {"/healthz": page, "/broken": broken})
    listening.open()
    yield listening
    listening.close()


def get(listening, path, method="GET"):
    return requests.request(method, f"http://127.0.0.1:{listening.port}{path}", timeout=10)


def ended(peer):
    try:
        return peer.recv(10) == b""
    except ConnectionResetError:
        return True


def test_listener_serves_each_page(listener):
    answer = get(listener, "/healthz?verbose")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"


OWN_NAMES = [
    "127.0.0.1",
    "127.0.0.1:9464",
    "localhost",
    "LOCALHOST:1",
    "localhost.",
    "127.8.9.10",
    "[::1]",
    "[::1]:9464",
]
FOREIGN_NAMES = [
    "evil.example",
    "evil.example:9464",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.4",
    "",
    "[::1",
    "a b",
]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_loopback_listener_accepts_the_host_names_of_this_machine(listener, name):
    answer = requests.get(f"http://127.0.0.1:{listener.port}/healthz", headers={"Host": name}, timeout=10)
    assert answer.status_code == 200


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_loopback_listener_rejects_foreign_host_names(listener, name):
    answer = requests.get(f"http://127.0.0.1:{listener.port}/healthz", headers={"Host": name}, timeout=10)
    assert (answer.status_code, b"status" in answer.content) == (421, False)


def test_listener_on_all_addresses_accepts_any_host_name():
    listening = HealthServer("0.0.0.0", 0, {"/healthz": page})
    listening.open()
    try:
        url = f"http://127.0.0.1:{listening.port}/healthz"
        assert requests.get(url, headers={"Host": "vm-7.internal:9464"}, timeout=10).status_code == 200
    finally:
        listening.close()


def test_page_failure_returns_500_and_is_logged(listener, caplog):
    answer = get(listener, "/broken")
    assert (answer.status_code, "RuntimeError" in answer.text) == (500, False)
    assert "RuntimeError" in caplog.text
    assert get(listener, "/healthz").status_code == 200


def test_slow_clients_do_not_block_a_probe(listener):
    with ExitStack() as stack:
        for _ in range(60):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            peer.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
            assert get(listener, "/healthz").status_code == 200
        until_sixteen_are_left(seconds=4)  # each connection ends after 5 s without intervention


def test_burst_of_slow_clients_leaves_sixteen_connections(listener):
    with ExitStack() as stack:
        for _ in range(4):
            peers = [stack.enter_context(socket.create_connection(("127.0.0.1", listener.port))) for _ in range(64)]
            for peer in peers:
                with suppress(OSError):
                    peer.sendall(b"G")
        until_sixteen_are_left(seconds=10)
        assert get(listener, "/healthz").status_code == 200


def until_sixteen_are_left(*, seconds):
    deadline = time.monotonic() + seconds
    while answering() > 17:  # including the connection that just got a response
        assert time.monotonic() < deadline, answering()
        time.sleep(0.05)


def answering():
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_occupied_port_is_logged_once_and_bound_when_free(caplog):
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listening = HealthServer("127.0.0.1", taken.getsockname()[1], {"/healthz": page})
        listening.open()
        listening.open()
        assert listening.port is None
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    listening._next_try = 0.0
    listening.open()
    try:
        assert get(listening, "/healthz").status_code == 200
        assert "The agent listens on status.listen again." in caplog.text
    finally:
        listening.close()


def test_close_ends_connections_and_frees_the_port_quickly():
    def seconds_to_close():
        with held_port() as port:
            listening = HealthServer("127.0.0.1", port, {"/healthz": page})
            listening.open()
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(b"GET ")
                started = time.monotonic()
                listening.close()
                seconds = time.monotonic() - started
                peer.settimeout(20)
                assert ended(peer)
            with socket.create_server(("127.0.0.1", port)):
                pass
            listening.close()
        return seconds

    assert least(seconds_to_close, below=1.0) < 1.0


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6 here")
def test_listener_supports_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 loopback here")
    listening = HealthServer("::1", 0, {"/healthz": page})
    listening.open()
    try:
        assert requests.get(f"http://[::1]:{listening.port}/healthz", timeout=10).status_code == 200
    finally:
        listening.close()


def test_probe_without_a_free_descriptor_uses_no_cpu_and_is_served_later(listener):
    with socket.socket() as prober:
        with no_descriptors():
            prober.connect(("127.0.0.1", listener.port))
            prober.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            before = time.process_time()
            threading.Event().wait(0.5)
            used_seconds = time.process_time() - before
        prober.settimeout(5)
        assert prober.recv(100).startswith(b"HTTP/1.0 200")
    assert used_seconds < 0.1


def test_page_is_served_while_no_thread_can_start(listener):
    with no_threads():
        assert get(listener, "/healthz").status_code == 200
