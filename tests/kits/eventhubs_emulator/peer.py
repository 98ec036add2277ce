"""One connection of the emulator: AMQP 1.0 with proton's engine, and the Event Hubs protocol on top.

The protocol follows Microsoft's page "AMQP 1.0 in Azure Service Bus and Event Hubs protocol guide": SASL ANONYMOUS, a
token put to `$cbs` first, `$management` for the properties of the hub and the partitions, senders to the hub or a
partition, and receivers on a partition of a consumer group.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

from eventhubs_emulator.claims import refusal
from eventhubs_emulator.frames import Padder
from eventhubs_emulator.hub import Hub

proton: Any = importlib.import_module("proton")

_CREDIT = 300
_NODES = ("$cbs", "$management")


class Peer:
    """Serves one client until either side is gone."""

    def __init__(self, hub: Hub, *, key_name: str, key: str) -> None:
        self._hub = hub
        self._key_name = key_name
        self._key = key
        self._is_authorized = False
        self._is_silent = False
        self._padder = Padder()
        self._replies: dict[str, Any] = {}
        self._positions: dict[str, tuple[Any, int, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tag = 0
        self._collector = proton.Collector()
        self._connection = proton.Connection()
        self._connection.collect(self._collector)
        self._transport = proton.Transport(proton.Transport.SERVER)
        self._transport.sasl().allowed_mechs("ANONYMOUS")
        self._transport.bind(self._connection)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection until the client or a fault ends it."""
        self._writer = writer
        self._is_silent = self._hub.settings.silent_at == "accept"
        try:
            while True:
                await self._hub.may_read.wait()
                received = await reader.read(65_536)
                if not received:
                    break
                if not self._is_silent:
                    self._take(received)
        except (ConnectionError, proton.ProtonException):
            pass
        finally:
            for task in self._tasks:
                task.cancel()
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()

    def drop(self) -> None:
        """Reset the connection, and discard pending output."""
        self._is_silent = True
        raw = self._writer.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def send_new(self) -> None:
        """Send new events of the hub to the consumers on this connection."""
        for name in list(self._positions):
            self._send_events(name)
        self._flush()

    def _take(self, received: bytes) -> None:
        while received:
            room = self._transport.capacity()
            if room <= 0:
                break
            self._transport.push(received[:room])
            received = received[room:]
            self._handle_events()
        self._flush()

    def _handle_events(self) -> None:
        while event := self._collector.peek():
            handler = getattr(self, f"_on_{event.type.name.lower().removeprefix('pn_')}", None)
            if handler is not None and not self._is_silent:
                handler(event)
            self._collector.pop()

    def _flush(self) -> None:
        while (pending := self._transport.pending()) > 0:
            written = self._transport.peek(pending)
            self._transport.pop(len(written))
            padded = self._padder.feed(written)
            if not self._is_silent and not self._writer.is_closing():
                self._writer.write(padded)

    # Engine events.

    def _on_connection_remote_open(self, event: Any) -> None:
        if self._silent_at("open"):
            return
        event.connection.container = "emulator"
        event.connection.open()

    def _on_connection_remote_close(self, event: Any) -> None:
        event.connection.close()

    def _on_session_remote_open(self, event: Any) -> None:
        event.session.incoming_capacity = 64 * 1024 * 1024
        event.session.open()

    def _on_session_remote_close(self, event: Any) -> None:
        event.session.close()

    def _on_link_remote_close(self, event: Any) -> None:
        self._positions.pop(event.link.name, None)
        event.link.close()

    def _on_link_remote_detach(self, event: Any) -> None:
        self._on_link_remote_close(event)

    def _on_link_flow(self, event: Any) -> None:
        if event.link.is_sender:
            self._send_events(event.link.name)

    def _on_link_remote_open(self, event: Any) -> None:
        link = event.link
        address = link.remote_target.address if link.is_receiver else link.remote_source.address
        node = urlsplit(address).path.strip("/") if "://" in address else address
        if self._silent_at("cbs" if node == "$cbs" else "attach"):
            return
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        if node in _NODES:
            if link.is_sender:
                self._replies[node] = link
        elif (error := self._refused(node)) is not None:
            link.open()
            link.condition = proton.Condition(*error, {proton.symbol("by"): "emulator"})
            link.close()
            return
        elif link.is_receiver:
            link.max_message_size = self._hub.settings.max_message_size
        else:
            self._positions[link.name] = (link, int(node.rpartition("/")[2]), self._start(link))
        link.open()
        if link.is_receiver:
            link.flow(_CREDIT)

    def _on_delivery(self, event: Any) -> None:
        delivery, link = event.delivery, event.link
        if link.is_sender:
            if delivery.updated:
                delivery.settle()
            return
        if not delivery.readable or delivery.partial:
            return
        encoded = link.recv(delivery.pending)
        link.advance()
        target = link.target.address
        node = urlsplit(target).path.strip("/") if "://" in target else target
        if node in _NODES:
            delivery.update(delivery.ACCEPTED)
            delivery.settle()
            self._answer(node, encoded)
        else:
            self._transfer(link, delivery, encoded, node)
        if link.credit < _CREDIT // 2:
            link.flow(_CREDIT - link.credit)

    # Tokens and properties.

    def _answer(self, node: str, encoded: bytes) -> None:
        request = proton.Message()
        request.decode(encoded)
        wanted = {str(name): value for name, value in request.properties.items()}
        if node == "$cbs":
            status, said, body = self._put_token(str(request.body), wanted)
        else:
            status, said, body = self._read(wanted)
        reply = proton.Message(body=body, correlation_id=request.id)
        reply.properties = {"status-code": proton.int32(status), "status-description": said}
        self._send(self._replies[node], reply.encode())

    def _put_token(self, token: str, wanted: dict[str, Any]) -> tuple[int, str, Any]:
        name, token_type = str(wanted.get("name")), str(wanted.get("type"))
        self._hub.tokens.append({"name": name, "type": token_type, "token": token})
        error = refusal(token, token_type, name, hub=self._hub.name, key_name=self._key_name, key=self._key)
        status = self._hub.settings.token_status or (401 if error else 202)
        self._is_authorized = status == 202
        return status, error or ("Accepted" if status == 202 else "Refused on request"), None

    def _read(self, wanted: dict[str, Any]) -> tuple[int, str, Any]:
        if not self._is_authorized or wanted.get("operation") != "READ":
            return 401, "Unauthorized", {}
        if wanted.get("name") != self._hub.name:
            return 404, f"The messaging entity {wanted.get('name')!r} could not be found.", {}
        now = proton.timestamp(int(time.time() * 1000))
        if wanted.get("type") == "com.microsoft:eventhub":
            ids = proton.Array(
                proton.UNDESCRIBED, proton.Data.STRING, *(str(number) for number in range(self._hub.partition_count))
            )
            return 200, "OK", {"name": self._hub.name, "created_at": now, "partition_ids": ids}
        events = self._hub.partitions[int(wanted["partition"])]
        last = len(events) - 1
        body = {"name": self._hub.name, "partition": str(wanted["partition"]), "begin_sequence_number": 0}
        body |= {
            "last_enqueued_sequence_number": last,
            "last_enqueued_offset": str(last),
            "is_partition_empty": last < 0,
        }
        return 200, "OK", body | {"last_enqueued_time_utc": now}

    # Transfers.

    def _refused(self, node: str) -> tuple[str, str] | None:
        hub = node.partition("/")[0]
        if not self._is_authorized:
            return "amqp:unauthorized-access", "Unauthorized access. 'Send' claim(s) are required. put-token first."
        if hub != self._hub.name:
            return "amqp:not-found", f"The messaging entity 'sb://emulator/{hub}' could not be found."
        return None

    def _transfer(self, link: Any, delivery: Any, encoded: bytes, node: str) -> None:
        hub = self._hub
        hub.note(encoded)
        if len(encoded) > hub.settings.max_message_size:
            self._detach(link, "amqp:link:message-size-exceeded", f"The message is {len(encoded)} bytes long.")
            return
        partition = int(node.rpartition("/")[2]) if "/" in node else None
        fault = hub.next_fault()
        kind = fault.get("kind", "accept")
        if kind == "late":
            self._later(fault, lambda: self._accept(delivery, encoded, partition))
            return
        if kind in {"accept", "no_ack", "drop_after", "late_ack"}:
            hub.store(encoded, partition)
        if kind == "accept":
            self._settle(delivery, delivery.ACCEPTED)
        elif kind == "late_ack":
            self._later(fault, lambda: self._settle(delivery, delivery.ACCEPTED))
        elif kind in {"drop_before", "drop_after"}:
            self.drop()
        elif kind == "reject":
            self._reject(delivery, fault)
        elif kind in {"release", "modify"}:
            self._settle(delivery, delivery.RELEASED if kind == "release" else delivery.MODIFIED)
        elif kind == "detach":
            self._detach(
                link, fault.get("condition", "amqp:link:detach-forced"), fault.get("description", "On request")
            )

    def _accept(self, delivery: Any, encoded: bytes, partition: int | None) -> None:
        self._hub.store(encoded, partition)
        self._settle(delivery, delivery.ACCEPTED)

    def _settle(self, delivery: Any, outcome: Any) -> None:
        delivery.update(outcome)
        delivery.settle()

    def _reject(self, delivery: Any, fault: dict[str, Any]) -> None:
        condition = fault.get("condition", "amqp:internal-error")
        said = fault.get("description", "The emulator was asked to reject.")
        delivery.local.condition = proton.Condition(condition, said, {proton.symbol("by"): "emulator"})
        self._settle(delivery, delivery.REJECTED)

    def _detach(self, link: Any, condition: str, said: str) -> None:
        link.condition = proton.Condition(condition, said, {proton.symbol("by"): "emulator"})
        link.close()

    def _later(self, fault: dict[str, Any], action: Any) -> None:
        async def act() -> None:
            await asyncio.sleep(float(fault.get("seconds", 1.0)))
            action()
            self._flush()

        task = asyncio.get_running_loop().create_task(act())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start(self, link: Any) -> int:
        """Return the first sequence number that the consumer's filter matches."""
        found = re.search(r"x-opt-(?:offset|sequence-number) (>=?) '?(-?\d+|@latest)'?", str(_filter_of(link)))
        if found is None:
            return 0
        if found[2] == "@latest":
            return len(self._hub.partitions[int(link.remote_source.address.rpartition("/")[2])])
        return int(found[2]) + (found[1] == ">")

    def _send_events(self, name: str) -> None:
        if name not in self._positions:
            return
        link, partition, position = self._positions[name]
        events = self._hub.partitions[partition]
        while link.credit > 0 and position < len(events):
            self._send(link, events[position].encoded)
            position += 1
        self._positions[name] = (link, partition, position)

    def _send(self, link: Any, encoded: bytes) -> None:
        self._tag += 1
        link.delivery(str(self._tag))
        link.send(encoded)
        link.advance()

    def _silent_at(self, moment: str) -> bool:
        if self._hub.settings.silent_at == moment:
            self._is_silent = True
        return self._is_silent


def _filter_of(link: Any) -> Any:
    data = link.remote_source.filter
    data.rewind()
    return data.get_object() if data.next() else None
