"""An AMQP 1.0 emulator of Event Hubs as a separate process, with AMQP over TCP and TLS and an HTTP control port.

    python -m eventhubs_emulator.serve --hub NAME --key-name NAME --key KEY [--cert FILE --cert-key FILE]

Prints one line of JSON with its ports. The control port: GET /state; POST /faults with a list of
`{"kind": ..., "count": 1}` (reject, release, modify, no_ack, late, late_ack, drop_before, drop_after, detach), which
apply to the next transfers in order; POST /settings (the fields of hub.Settings); POST /drop, which
resets every connection. The process ends at the end of its standard input, when its parent has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
from typing import Any

from eventhubs_emulator.hub import Hub, Settings
from eventhubs_emulator.peer import Peer

_HOST = "127.0.0.1"


class Emulator:
    """The hub, its connections, and the control port."""

    def __init__(self, hub: Hub, *, key_name: str, key: str) -> None:
        self._hub = hub
        self._key_name = key_name
        self._key = key
        self._peers: set[Peer] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one AMQP client."""
        peer = Peer(self._hub, key_name=self._key_name, key=self._key)
        self._peers.add(peer)
        self._hub.connections_ever += 1
        try:
            await peer.serve(reader, writer)
        finally:
            self._peers.discard(peer)

    async def tell_consumers(self) -> None:
        """Send new events to the receivers in an endless loop."""
        while True:
            await self._hub.changed.wait()
            self._hub.changed.clear()
            for peer in list(self._peers):
                peer.send_new()

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to one request of the control port."""
        method, path, _ = (await reader.readline()).decode().split()
        length = 0
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-length":
                length = int(value)
        body = json.loads(await reader.readexactly(length) or b"null")
        answer = json.dumps(self._obeyed(f"{method} {path}", body)).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + answer)
        await writer.drain()
        writer.close()

    def _obeyed(self, command: str, body: Any) -> dict[str, Any]:
        hub = self._hub
        if command == "POST /faults":
            for fault in body:
                hub.faults.extend([fault] * fault.get("count", 1))
        elif command == "POST /settings":
            hub.settings = Settings(**{**vars(hub.settings), **body})
            (hub.may_read.set if hub.settings.is_reading else hub.may_read.clear)()
        elif command == "POST /drop":
            for peer in list(self._peers):
                peer.drop()
        return {
            "connections": len(self._peers),
            "connections_ever": hub.connections_ever,
            "transfers": hub.transfers,
            "writes": hub.writes,
            "tokens": hub.tokens,
            "faults": len(hub.faults),
            "events": [event.shown() for events in hub.partitions for event in events],
        }


async def main(options: argparse.Namespace) -> None:
    """Listen, print the ports, and serve until standard input ends."""
    hub = Hub(name=options.hub, partition_count=options.partitions)
    emulator = Emulator(hub, key_name=options.key_name, key=options.key)
    servers = {
        "amqp": await asyncio.start_server(emulator.accept, _HOST, 0),
        "control": await asyncio.start_server(emulator.control, _HOST, 0),
    }
    if options.cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(options.cert, options.cert_key)
        servers["amqps"] = await asyncio.start_server(emulator.accept, _HOST, 0, ssl=context)
    ports = {name: server.sockets[0].getsockname()[1] for name, server in servers.items()}
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    telling = asyncio.create_task(emulator.tell_consumers())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    telling.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hub", required=True)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--key-name", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--cert")
    parser.add_argument("--cert-key")
    asyncio.run(main(parser.parse_args()))
