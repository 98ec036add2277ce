"""An HTTP/1.1 server that responds to every request with 200. Run it with `python bare_receiver.py PORT`."""

from __future__ import annotations

import socket
import sys
import threading


def serve(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    received = b""
    while True:
        while b"\r\n\r\n" not in received:
            chunk = connection.recv(65536)
            if not chunk:
                return
            received += chunk
        head, _, received = received.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        while len(received) < length:
            received += connection.recv(65536)
        received = received[length:]
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        while True:
            accepted, _ = listener.accept()
            threading.Thread(target=serve, args=(accepted,), daemon=True).start()
