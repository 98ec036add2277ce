"""Simulated destinations for tests of sinks.

A `Peer` is a destination whose responses are controlled by a test. For HTTP, use `bridge.testing.http_peer`. For any
other protocol, subclass `Peer`. This module also simulates hosts that refuse connections, reset connections, or never
respond.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_BACKLOG = 128
_LOOK_SECONDS = 0.01
_BUSY_SECONDS = 5.0
_WAKE_SECONDS = 0.05
_JOIN_SECONDS = 5.0
#: RFC 6761 section 6.4 reserves .invalid, so this name never resolves.
NOWHERE = "no-such-host.invalid"


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a destination."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """Return ``HOST:PORT`` for use in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Peer(ABC):
    """A destination whose responses a test controls.

    Each setting applies until the test changes it.
    """

    address: Address = Address(host="127.0.0.1", port=9)
    """The address of the peer. A sink that uses no network does not need this address."""

    @property
    @abstractmethod
    def received(self) -> Sequence[Sequence[str]]:
        """Return the record IDs in each write to the peer, in order, including rejected writes."""

    @abstractmethod
    def accept(self) -> None:
        """Accept all records. This is the initial setting."""

    def refuse_for_good(self) -> None:
        """Reject all records permanently."""
        raise NotImplementedError

    def refuse_for_now(self, retry_after_seconds: int | None = None) -> None:
        """Reject all records temporarily, with a Retry-After if *retry_after_seconds* is given."""
        raise NotImplementedError

    def refuse_part(self, refused_ids: Sequence[str]) -> None:
        """Accept all records except for *refused_ids*."""
        raise NotImplementedError

    def stay_silent(self) -> None:
        """Accept connections and data, but send no response."""
        raise NotImplementedError

    def wait_until_busy(self, *, writes_before: int) -> None:
        """Wait up to 5 s until a silent peer has received more than *writes_before* writes."""
        deadline = time.monotonic() + _BUSY_SECONDS
        never = threading.Event()
        while len(self.received) <= writes_before and time.monotonic() < deadline:
            never.wait(_LOOK_SECONDS)

    def close(self) -> None:  # noqa: B027  # a peer can have no resources
        """Release the resources of the peer."""

    def __enter__(self) -> Peer:  # noqa: PYI034  # Python 3.10 has no Self
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def closed_port() -> Iterator[Address]:
    """Yield an address that refuses connections. The port stays reserved during the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield _address(held)


@contextmanager
def silent_listener() -> Iterator[tuple[Address, socket.socket]]:
    """Yield the address and socket of a server that accepts connections but sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        yield _address(listener), listener


def was_connected_to(listener: socket.socket) -> bool:
    """Return whether a client has connected to *listener*."""
    return bool(select.select([listener], [], [], 0)[0])


@contextmanager
def resetting_listener(*, after_reading: bool) -> Iterator[Address]:
    """Yield the address of a server that resets each connection.

    If *after_reading* is true, the server first reads one byte.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        listener.settimeout(_WAKE_SECONDS)
        stop = threading.Event()
        resetter = threading.Thread(
            target=_reset_all, args=(listener, stop, after_reading), name="resetting-peer", daemon=True
        )
        resetter.start()
        try:
            yield _address(listener)
        finally:
            stop.set()
            resetter.join(_JOIN_SECONDS)


def _reset_all(listener: socket.socket, stop: threading.Event, after_reading: object) -> None:
    while not stop.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection, contextlib.suppress(OSError):
            if after_reading:
                connection.settimeout(_BUSY_SECONDS)
                connection.recv(1)
            # If the linger time is 0, close sends RST.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _address(bound: socket.socket) -> Address:
    host, port = bound.getsockname()[:2]
    return Address(host=str(host), port=int(port))
