"""200 lost connections of polls are released.

tests/bench/test_portal.py measures 5,000 polls.
"""

import gc
import socket
import struct

import pytest
from fleet_records import vm_id_of
from portal_kit import AGENT_TOKEN, RunningPortal
from waiting import until

from bridge.portal.http_limits import LimitedHttp

COUNT = 200
SECONDS = 30.0


@pytest.fixture
def portal(tmp_path):
    with RunningPortal(tmp_path) as running:
        yield running


@pytest.fixture
def polls(portal):
    opened = [_poll(portal, vm) for vm in range(COUNT)]
    until(lambda: portal.held_polls() == COUNT)
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
    for client in polls[::2]:  # close with a reset
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for client in polls:
        client.close()
    until(lambda: portal.held_polls() == 0)
    until(lambda: _connections() <= 10)  # the connections of the metrics requests
