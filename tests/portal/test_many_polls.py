"""200 concurrent polls: each receives its own decision, and lost connections are released.

tests/bench/test_portal.py measures 5,000 polls.
"""

from __future__ import annotations

import gc
import json
import re
import socket
import struct
import time

import pytest
import requests
from fleet_records import vm_id_of
from portal_kit import AGENT_TOKEN, RunningPortal
from signers import Signer

from bridge.portal.http_limits import LimitedHttp

COUNT = 200
SECONDS = 30.0


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def portal(tmp_path, signer):
    with RunningPortal(tmp_path, keys=[signer.table()]) as running:
        yield running


@pytest.fixture
def polls(portal):
    opened = [_poll(portal, vm) for vm in range(COUNT)]
    _wait_until_held(portal, COUNT)
    yield opened
    for each in opened:
        each.close()


def _poll(portal, vm):
    client = socket.create_connection(portal.portal.address, timeout=SECONDS)
    client.sendall(
        f"GET /api/v1/vms/{vm_id_of(vm)}/decisions?index=1&wait=600 HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {AGENT_TOKEN}\r\n\r\n".encode()
    )
    return client


def _held(portal):
    return float(re.search(r"^scheduled_events_portal_held_polls (\S+)$", portal.metrics(), re.MULTILINE)[1])


def _wait_until_held(portal, count):
    until = time.monotonic() + SECONDS
    while _held(portal) != count:
        assert time.monotonic() < until, _held(portal)
        time.sleep(0.02)


def test_each_held_poll_receives_its_own_decision(portal, polls, signer):
    tokens = [signer.sign(vm_id_of(vm)) for vm in range(COUNT)]
    assert requests.post(f"{portal.url}/decisions", json={"decisions": tokens}, timeout=SECONDS).status_code == 200
    for client, token in zip(polls, tokens, strict=True):
        head, _, body = client.recv(65_536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(body)["decisions"] == [token]
    _wait_until_held(portal, 0)


@pytest.fixture
def uncollected():
    """Disable the garbage collector, which rarely runs in an idle process."""
    gc.disable()
    yield
    gc.enable()


def _connections():
    return sum(isinstance(each, LimitedHttp) for each in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
def test_closed_connections_are_released(portal, polls):
    assert _connections() >= COUNT
    for client in polls:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    _wait_until_held(portal, 0)
    until = time.monotonic() + SECONDS
    while _connections() > 10:  # the connections of the metrics requests
        assert time.monotonic() < until, _connections()
        time.sleep(0.2)
