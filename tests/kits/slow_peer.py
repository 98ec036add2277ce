"""A TCP server for tests of deadlines, and the ways in which a peer can fail to respond."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


Behaviour = Callable[["SlowPeer", socket.socket, int], object]


class SlowPeer:
    """Runs *behaviour* on each connection, in a thread per connection, until `close`."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.stop = threading.Event()
        self.requests: queue.Queue[bytes] = queue.Queue()
        self._behaviour = behaviour
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/path"

    @property
    def accepted(self) -> int:
        return len(self._connections)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self.stop.is_set():
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self._behaviour(self, connection, len(self._connections))

    def read_request(self, connection: socket.socket) -> bytes:
        """Return the next request with its body, b"" if the client closed the connection."""
        received = b""
        while b"\r\n\r\n" not in received:
            part = connection.recv(65536)
            if not part:
                return b""
            received += part
        self.requests.put(received)
        return received

    def close(self) -> None:
        self.stop.set()
        for end in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)


def silent(_peer: SlowPeer, connection: socket.socket, _: int) -> None:
    while connection.recv(65536):
        pass


def _drip(peer: SlowPeer, connection: socket.socket, head: bytes, piece: bytes) -> None:
    """Send *head*, and then *piece* repeatedly until the peer stops."""
    peer.read_request(connection)
    connection.sendall(head)
    while not peer.stop.wait(0.05):
        connection.sendall(piece)


def drip_header(peer: SlowPeer, connection: socket.socket, _: int) -> None:
    _drip(peer, connection, b"HTTP/1.1 200 OK\r\nX-Long: ", b"x")


def drip_body(peer: SlowPeer, connection: socket.socket, _: int) -> None:
    _drip(peer, connection, b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x")


def drip_body_until_close(peer: SlowPeer, connection: socket.socket, _: int) -> None:
    _drip(peer, connection, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x")


def drip_chunks(peer: SlowPeer, connection: socket.socket, _: int) -> None:
    _drip(peer, connection, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n")


#: Behaviors that never complete a response.
NEVER_FINISHING = (silent, drip_header, drip_body, drip_body_until_close, drip_chunks)


def hear_and_say_nothing(peer: SlowPeer, connection: socket.socket, number: int) -> None:
    peer.read_request(connection)
    silent(peer, connection, number)


def never_read(peer: SlowPeer, _connection: socket.socket, _: int) -> None:
    peer.stop.wait(60)


def answer(peer: SlowPeer, connection: socket.socket, _: int) -> None:
    while peer.read_request(connection):
        connection.sendall(OK)


def responding(response: bytes) -> Behaviour:
    """Return a behavior that sends *response* and closes the connection."""

    def respond(peer: SlowPeer, connection: socket.socket, _: int) -> None:
        peer.read_request(connection)
        connection.sendall(response)

    return respond
