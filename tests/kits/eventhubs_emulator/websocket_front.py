"""A TLS port with the WebSocket protocol of Event Hubs that forwards the bytes to the AMQP port of the emulator.

    python -m eventhubs_emulator.websocket_front AMQP_PORT CERT_FILE KEY_FILE

Prints its port, and stops at the end of its standard input. Needs aiohttp, like the WebSocket transport of the SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ssl
import sys
from typing import Any

web: Any = importlib.import_module("aiohttp.web")

_HOST = "127.0.0.1"
_CHUNK_BYTES = 65_536


async def main(amqp_port: int, cert_file: str, key_file: str) -> None:
    """Serve until standard input ends."""

    async def carry(request: Any) -> Any:
        socket = web.WebSocketResponse(protocols=("AMQPWSB10",))
        await socket.prepare(request)
        reader, writer = await asyncio.open_connection(_HOST, amqp_port)
        back = asyncio.create_task(_carry_back(reader, socket))
        async for message in socket:
            writer.write(message.data)
        writer.close()
        back.cancel()
        return socket

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert_file, key_file)
    app = web.Application()
    app.router.add_get("/$servicebus/websocket", carry)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, _HOST, 0, ssl_context=context).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


async def _carry_back(reader: asyncio.StreamReader, socket: Any) -> None:
    with contextlib.suppress(ConnectionError):
        while received := await reader.read(_CHUNK_BYTES):
            await socket.send_bytes(received)
    await socket.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
