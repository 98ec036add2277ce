"""Notifications to systemd over a real datagram socket."""

import os
import socket

import pytest
from closing import closing_each

from bridge.system.systemd import SystemdNotifier
from bridge.testing import ManualClock


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(0.2)
        yield listening


@pytest.fixture
def notifier_of():
    with closing_each(SystemdNotifier) as notifier_of:
        yield notifier_of


def heard(manager):
    """Return every message so far, as a list of its lines."""
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096).decode().splitlines())
        except TimeoutError:
            return messages


def test_service_manager_receives_ready_and_stopping(manager, notifier_of):
    notifier = notifier_of({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.ready("Watching vm1")
    notifier.alive()
    notifier.stopping(15.0)
    assert heard(manager) == [
        ["READY=1", "STATUS=Watching vm1"],
        ["STOPPING=1", "EXTEND_TIMEOUT_USEC=15000000", "STATUS=Sending the pending records"],
    ]
    notifier.close()
    notifier.close()
    notifier.ready("too late")


def test_vm_name_cannot_inject_notify_messages(manager, notifier_of):
    notifier_of({"NOTIFY_SOCKET": manager.getsockname()}).ready("Watching vm\nMAINPID=1\r")
    assert heard(manager) == [["READY=1", "STATUS=Watching vm MAINPID=1 "]]


def test_watchdog_is_fed_three_times_per_interval(manager, notifier_of):
    clock = ManualClock()
    notifier = notifier_of({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "9000000"}, clock.monotonic)
    for _ in range(10):
        notifier.alive()
        clock.advance(1)
    assert heard(manager) == [["WATCHDOG=1"]] * 4


def test_watchdog_of_another_process_is_not_fed(manager, notifier_of):
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "9000000", "WATCHDOG_PID": str(os.getpid() + 1)}
    notifier_of(environ).alive()
    assert heard(manager) == []


def test_notify_variables_are_removed_from_the_environment(manager, notifier_of):
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "PATH": "/bin"}
    notifier_of(environ)
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "@nobody-listens-here"])
def test_missing_service_manager_is_ignored(address, notifier_of):
    notifier = notifier_of({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "rubbish"})
    notifier.ready("x")
    notifier.alive()
    notifier.close()
