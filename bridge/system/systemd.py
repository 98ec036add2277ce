"""Reports the agent's startup, shutdown, and health to systemd (sd_notify(3)).

Notifications are sent as datagrams without waiting, so systemd cannot block the agent. The agent removes systemd's
variables from its environment so that programs started by command sinks cannot send notifications.
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
#: The agent notifies the watchdog three times per timeout, so two notifications can be lost.
_FEEDINGS = 3
_LEAST_SECONDS = 1.0


class SystemdNotifier:
    """Notifies systemd through the socket in ``NOTIFY_SOCKET``, if that variable is set."""

    def __init__(self, environ: MutableMapping[str, str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        address = environ.pop("NOTIFY_SOCKET", "")
        pid, microseconds = environ.pop("WATCHDOG_PID", ""), environ.pop("WATCHDOG_USEC", "")
        self._socket = _connected(address)
        is_for_us = pid in ("", str(os.getpid())) and microseconds.isdecimal()
        self._feed_seconds = int(microseconds) / _MICROSECONDS / _FEEDINGS if is_for_us else 0.0
        self._fed_at = float("-inf")
        self.feed_within_seconds = max(self._feed_seconds / _FEEDINGS, min(self._feed_seconds, _LEAST_SECONDS))
        """The interval for calls of `alive`, or 0 without a watchdog."""

    def ready(self, status: str) -> None:
        """Report that the agent has started, with *status* on one line."""
        # systemd reads each line as a separate assignment.
        self._send(f"READY=1\nSTATUS={one_line(status)}")

    def starting(self, status: str, within_seconds: float) -> None:
        """Extend the unit's start timeout by *within_seconds*, and report *status*."""
        self._send(f"EXTEND_TIMEOUT_USEC={within_seconds * _MICROSECONDS:.0f}\nSTATUS={one_line(status)}")

    def stopping(self, within_seconds: float) -> None:
        """Report that the agent is stopping, and extend the stop timeout to *within_seconds*."""
        self._send(
            f"STOPPING=1\nEXTEND_TIMEOUT_USEC={within_seconds * _MICROSECONDS:.0f}\nSTATUS=Sending the pending records"
        )

    def alive(self) -> None:
        """Notify the watchdog of systemd if a notification is due."""
        now = self._monotonic()
        if self._feed_seconds and now - self._fed_at >= self._feed_seconds:
            self._fed_at = now
            self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the socket. A second call has no effect."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(message.encode())
        except OSError as error:
            logger.debug("systemd was not notified: %s", error)


def _connected(address: str) -> socket.socket | None:
    if not address or not hasattr(socket, "AF_UNIX"):
        return None
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        notify.setblocking(False)  # noqa: FBT003  # the standard library's own signature
        notify.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    except OSError as error:
        notify.close()
        logger.warning("systemd cannot be notified: $NOTIFY_SOCKET is %r: %s", address, error)
        return None
    return notify
