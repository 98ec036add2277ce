"""The other side of a sink: what a test can make it say, and the three ways a connection fails without a word.

A `Peer` is what a sink author writes for a protocol of their own; `bridge.testing.http_peer` has the one for HTTP.
The rest needs no protocol: an address where nothing listens, one whose connections break, and one that takes
connections and says nothing. That last one never accepts: the kernel completes the handshake, so that the test adds
no thread and no socket to those it counts.
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
#: RFC 6761 section 6.4: no name under .invalid exists, and none ever will.
NOWHERE = "no-such-host.invalid"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a sink is told to send."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """Return ``HOST:PORT`` as it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Peer(ABC):
    """A destination that does as it is told; what is said last holds until something else is said."""

    address: Address = Address(host="127.0.0.1", port=9)
    """Where it listens. A sink without a network leaves this alone."""

    @property
    @abstractmethod
    def received(self) -> Sequence[Sequence[str]]:
        """Return the record ids of every write that reached the peer, in order, refused ones included."""

    @abstractmethod
    def accept(self) -> None:
        """Accept what comes. A peer begins so."""

    def refuse_for_good(self) -> None:
        """Refuse what comes because of what it is."""
        raise NotImplementedError

    def refuse_for_now(self, retry_after_seconds: int | None = None) -> None:
        """Refuse what comes because this is no good time; name one if asked to."""
        raise NotImplementedError

    def refuse_part(self, refused_ids: Sequence[str]) -> None:
        """Accept what comes, but for the records of *refused_ids*."""
        raise NotImplementedError

    def stay_silent(self) -> None:
        """Take what comes, and never answer."""
        raise NotImplementedError

    def wait_until_busy(self, *, writes_before: int) -> None:
        """Return once a silent peer has more than *writes_before* writes, after 5 s in any case."""
        deadline = time.monotonic() + _BUSY_SECONDS
        never = threading.Event()
        while len(self.received) <= writes_before and time.monotonic() < deadline:
            never.wait(_LOOK_SECONDS)

    def close(self) -> None:  # noqa: B027  # a peer may hold nothing
        """Let go of what the peer holds."""

    def __enter__(self) -> Peer:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def nobody() -> Iterator[Address]:
    """Yield an address of this machine that refuses connections; its port is held, so that nobody else gets it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield _address(held)


@contextmanager
def silent_listener() -> Iterator[tuple[Address, socket.socket]]:
    """Yield an address that takes connections and never says a word, and its listening socket."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        yield _address(listener), listener


def was_connected_to(listener: socket.socket) -> bool:
    """Return whether a connection waits at *listener*."""
    return bool(select.select([listener], [], [], 0)[0])


@contextmanager
def resetting_listener(*, after_reading: bool) -> Iterator[Address]:
    """Yield an address whose connections are reset, at once or *after_reading* a first byte."""
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
            # Lingering for no time makes close send RST.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _address(bound: socket.socket) -> Address:
    host, port = bound.getsockname()[:2]
    return Address(host=str(host), port=int(port))
