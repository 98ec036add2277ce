"""An HTTP proxy on 127.0.0.1 that supports CONNECT, requires a password if configured, or stays silent."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading

_CHUNK_BYTES = 65_536
_ASKED = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n"


class ConnectProxy:
    """Listens on a free port. *password* is `user:password`, or None for a proxy without authentication."""

    def __init__(self, *, password: str | None = None) -> None:
        self._wanted = None if password is None else "Basic " + base64.b64encode(password.encode()).decode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.targets: list[str] = []
        """The targets of all requested tunnels, including refused ones."""
        self.is_silent = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Close every tunnel."""
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> ConnectProxy:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            threading.Thread(target=self._tunnel, args=(client,), daemon=True).start()

    def _tunnel(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                received = client.recv(_CHUNK_BYTES)
                if not received:
                    return
                request += received
            method, target, _ = request.split(b"\r\n", 1)[0].decode().split(" ")
            self.targets.append(target)
            if self.is_silent:
                return
            headers = dict(line.lower().split(": ", 1) for line in request.decode().split("\r\n")[1:] if ": " in line)
            if method != "CONNECT" or (self._wanted and headers.get("proxy-authorization") != self._wanted.lower()):
                client.sendall(_ASKED)
                client.close()
                return
            host, _, port = target.rpartition(":")
            upstream = socket.create_connection((host, int(port)), timeout=10)
            upstream.settimeout(None)
            self._sockets.append(upstream)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            threading.Thread(target=_carry, args=(upstream, client), daemon=True).start()
            _carry(client, upstream)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(_CHUNK_BYTES):
            target.sendall(received)
        target.shutdown(socket.SHUT_WR)
