"""A minimal metadata service in a separate process, so that benchmarks measure only the agent.

    python document_server.py [--ports 1] [--changes 0] [--polls-a-change 1] [--events 1]

The server prints a line of JSON with its ports. For every new document that it serves, it prints a line with the port,
the incarnation of the document, and the monotonic time just before the response. Each port is a separate virtual
machine. The first document is empty. After every *polls-a-change* polls, the document changes, up to *changes* times:
to new events, to the same events as started, and to no events. Each change causes *events* records. ``GET /polls``
returns the number of polls of each port.

The ports also accept webhooks. For each webhook, the server prints a line with the port, the incarnation of the body or
of the record in the body, and ``taken_seconds``, the monotonic time after the complete request.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from dataclasses import dataclass
from functools import cache

_END_OF_HEAD = b"\r\n\r\n"
_SCHEDULED, _STARTED = 1, 2
_LONGEST_REQUEST = 65_536


@cache
def _document(number: int, events: int) -> bytes:
    """Return document *number* of a machine."""
    phase = number % 3
    first = (number - phase) // 3 * events
    return json.dumps(
        {
            "DocumentIncarnation": number + 1,
            "Events": [_event(first + place, is_started=phase == _STARTED) for place in range(events if phase else 0)],
        }
    ).encode()


def _event(serial: int, *, is_started: bool) -> dict[str, object]:
    return {
        "EventId": f"B0D5F2E8-1111-4222-8333-{serial:012X}",
        "EventStatus": "Started" if is_started else "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": ["bench-vm"],
        "NotBefore": "" if is_started else "Mon, 19 Sep 2044 18:29:47 GMT",
        "Description": "Virtual machine is being paused because of a memory-preserving Live Migration operation.",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
    }


def _answer(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _body_length(head: bytes) -> int:
    lengths = (line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return int(next(lengths, b"0"))


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@dataclass
class _Machine:
    """One virtual machine with the number of its polls and its last document."""

    port: int
    changes: int
    polls_a_change: int
    events: int
    polls: int = 0
    shown: int = 0

    def poll(self) -> bytes:
        number = min(self.polls // self.polls_a_change, self.changes)
        self.polls += 1
        answer = _answer(_document(number, self.events))
        if number != self.shown:
            self.shown = number
            line = {"port": self.port, "incarnation": number + 1, "monotonic_seconds": time.monotonic()}
            _say(line)
        return answer

    def take(self, body: bytes, at: float) -> None:
        """Print a line for a webhook that arrived at the monotonic time *at*."""
        record = json.loads(body)
        incarnation = record.get("data", record)["incarnation"]
        _say({"port": self.port, "incarnation": incarnation, "taken_seconds": at})

    def identity(self) -> bytes:
        vm_id = f"b0d5f2e8-aaaa-4bbb-8ccc-{self.port:012x}"
        return _answer(json.dumps({"name": "bench-vm", "vmId": vm_id, "location": "westeurope"}).encode())


class _Server:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._selector = selectors.DefaultSelector()
        self._machines: list[_Machine] = []
        self._heads: dict[socket.socket, bytes] = {}
        for _ in range(arguments.ports):
            listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            machine = _Machine(
                port=listener.getsockname()[1],
                changes=arguments.changes,
                polls_a_change=arguments.polls_a_change,
                events=arguments.events,
            )
            self._machines.append(machine)
            self._selector.register(listener, selectors.EVENT_READ, machine)

    def run(self) -> None:
        _say([machine.port for machine in self._machines])
        while True:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj in self._heads:
                    self._read(key.fileobj, key.data)
                else:
                    self._accept(key.fileobj, key.data)

    def _accept(self, listener: socket.socket, machine: _Machine) -> None:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heads[client] = b""
        self._selector.register(client, selectors.EVENT_READ, machine)

    def _read(self, client: socket.socket, machine: _Machine) -> None:
        try:
            received = client.recv(_LONGEST_REQUEST)
        except ConnectionError:
            received = b""
        if not received:
            self._selector.unregister(client)
            del self._heads[client]
            client.close()
            return
        request = self._heads[client] + received
        head, _, body = request.partition(_END_OF_HEAD)
        if _END_OF_HEAD not in request or len(body) < _body_length(head):
            self._heads[client] = request
            return
        self._heads[client] = b""
        if request.startswith(b"POST "):
            machine.take(body, time.monotonic())
            client.sendall(_answer(b""))
            return
        client.sendall(self._answer_to(request.split(b" ", 2)[1], machine))

    def _answer_to(self, target: bytes, machine: _Machine) -> bytes:
        if target.startswith(b"/metadata/scheduledevents"):
            return machine.poll()
        if target.startswith(b"/metadata/instance"):
            return machine.identity()
        return _answer(json.dumps({str(each.port): each.polls for each in self._machines}).encode())


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ports", 1), ("changes", 0), ("polls-a-change", 1), ("events", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    _Server(parser.parse_args()).run()


if __name__ == "__main__":
    main()
