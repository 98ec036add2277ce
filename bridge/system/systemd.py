"""What systemd is told: ready, alive, stopping (sd_notify(3), over a datagram socket; the library is not needed).

A datagram is sent without waiting and may be lost: the service manager must never hold up the agent. The address is
taken out of the environment, so that no program that a sink starts speaks in the agent's name.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping

from bridge.text import one_line

logger = logging.getLogger(__name__)

_MICROSECONDS = 1_000_000
#: A watchdog is fed three times in its time: twice may fail.
_FEEDINGS = 3
_LEAST_SECONDS = 1.0


class SystemdNotifier:
    """Tells the service manager named in *environ*; without one every call does nothing. *monotonic*: seconds."""

    def __init__(self, environ: MutableMapping[str, str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        address = environ.pop("NOTIFY_SOCKET", "")
        pid, microseconds = environ.pop("WATCHDOG_PID", ""), environ.pop("WATCHDOG_USEC", "")
        self._socket = _connected(address)
        is_for_us = pid in ("", str(os.getpid())) and microseconds.isdecimal()
        self._feed_seconds = int(microseconds) / _MICROSECONDS / _FEEDINGS if is_for_us else 0.0
        self._fed_at = float("-inf")
        self.feed_within_seconds = max(self._feed_seconds / _FEEDINGS, min(self._feed_seconds, _LEAST_SECONDS))
        """How often to call `alive`; 0 where there is no watchdog."""

    def ready(self, status: str) -> None:
        """Say that the agent has started, and in *status* what it does; one line."""
        # A line of its own would be an order of its own.
        self._send(f"READY=1\nSTATUS={one_line(status)}")

    def starting(self, status: str, within_seconds: float) -> None:
        """Say that the start goes on, for so long at least whatever the unit file allows, and in *status* why."""
        self._send(f"EXTEND_TIMEOUT_USEC={within_seconds * _MICROSECONDS:.0f}\nSTATUS={one_line(status)}")

    def stopping(self, within_seconds: float) -> None:
        """Say that the agent is about to end, and that it may take so long, whatever the unit file allows."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={within_seconds * _MICROSECONDS:.0f}\nSTATUS=Sending what is due")

    def alive(self) -> None:
        """Feed the watchdog, if there is one and it is time to."""
        now = self._monotonic()
        if self._feed_seconds and now - self._fed_at >= self._feed_seconds:
            self._fed_at = now
            self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the socket; closing twice is fine."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(message.encode())
        except OSError as error:
            logger.debug("systemd was not told: %s", error)


def _connected(address: str) -> socket.socket | None:
    if not address or not hasattr(socket, "AF_UNIX"):
        return None
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        notify.setblocking(False)  # noqa: FBT003  # the standard library's own signature
        notify.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    except OSError as error:
        notify.close()
        logger.warning("systemd cannot be told how the agent does: $NOTIFY_SOCKET is %r: %s", address, error)
        return None
    return notify
