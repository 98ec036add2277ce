"""The state of an event hub: ordered partitions of events, and the configured faults."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import re
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

proton: Any = importlib.import_module("proton")

_DATA_SECTION = 0x75
#: The start of a message section: a described type with a small ulong from 0x70 (header) to 0x78 (footer).
_SECTION = re.compile(rb"\x00\x53[\x70-\x78]")
_KEY = "x-opt-partition-key"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One event in its partition, as sent to consumers."""

    partition: int
    sequence_number: int
    partition_key: str | None
    properties: dict[str, Any]
    content_type: str | None
    body: bytes
    encoded: bytes

    def shown(self) -> dict[str, Any]:
        """Return the event in the format of the control port."""
        return {
            "partition": self.partition,
            "sequence_number": self.sequence_number,
            "partition_key": self.partition_key,
            "properties": {str(name): value for name, value in self.properties.items()},
            "content_type": self.content_type,
            "body": base64.b64encode(self.body).decode(),
        }


@dataclass
class Settings:
    """The settings of a test. Every field is also a key of /settings on the control port."""

    max_message_size: int = 1_048_576
    silent_at: str = ""
    """The step at which connections stop responding: accept, open, cbs, attach. Empty: never."""
    is_reading: bool = True
    """While this is false, no socket is read."""
    token_status: int = 0
    """The response to every put-token, or 0 for the result of the check."""
    standing_fault: dict[str, Any] = field(default_factory=dict)
    """The outcome of every transfer without another fault. Empty: accepted."""


@dataclass
class Hub:
    """One event hub with its settings, counters, and pending faults."""

    name: str
    partition_count: int
    settings: Settings = field(default_factory=Settings)
    partitions: list[list[Stored]] = field(default_factory=list)
    faults: deque[dict[str, Any]] = field(default_factory=deque)
    transfers: int = 0
    writes: list[list[str]] = field(default_factory=list)
    connections_ever: int = 0
    tokens: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    may_read: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.partitions = [[] for _ in range(self.partition_count)]
        self.may_read.set()

    def next_fault(self) -> dict[str, Any]:
        """Return the outcome of the current transfer. Empty: stored and accepted."""
        return self.faults.popleft() if self.faults else self.settings.standing_fault

    def note(self, encoded: bytes) -> None:
        """Record the CloudEvents of a transfer, regardless of its outcome."""
        self.transfers += 1
        self.writes.append([_cloud_event_id(message) for message in _messages(encoded)[1]])

    def store(self, encoded: bytes, partition: int | None) -> None:
        """Store a message, or each message of a batch, in the partition of its key."""
        envelope, inner = _messages(encoded)
        key = _text((envelope.annotations or {}).get(_KEY))
        index = self._partition_of(key) if partition is None else partition
        for message in inner:
            self._append(message, key, index)
        self.changed.set()

    def _partition_of(self, key: str | None) -> int:
        if key is None:
            return min(range(self.partition_count), key=lambda index: len(self.partitions[index]))
        return zlib.crc32(key.encode()) % self.partition_count

    def _append(self, encoded: bytes, key: str | None, partition: int) -> None:
        message = proton.Message()
        message.decode(encoded)
        body = bytes(message.body)
        number = len(self.partitions[partition])
        annotations = {
            **(message.annotations or {}),
            proton.symbol("x-opt-sequence-number"): number,
            proton.symbol("x-opt-offset"): str(number),
            proton.symbol("x-opt-enqueued-time"): proton.timestamp(int(time.time() * 1000)),
        }
        if key is not None:
            annotations[proton.symbol(_KEY)] = key
        message.annotations = annotations
        self.partitions[partition].append(
            Stored(
                partition=partition,
                sequence_number=number,
                partition_key=_text(message.annotations.get(_KEY)),
                properties=dict(message.properties or {}),
                content_type=_text(message.content_type),
                body=body,
                encoded=message.encode(),
            )
        )


def _messages(encoded: bytes) -> tuple[Any, list[bytes]]:
    """Return the envelope of a message and its inner messages, or the message itself if it is not a batch.

    A batch (message format 0x80013700) is a message whose data sections are messages. proton does not expose the
    format, so the start of the first data section identifies a batch.
    """
    envelope, inner = _opened(encoded)
    return envelope, inner if inner and _SECTION.match(inner[0]) else [encoded]


def _cloud_event_id(encoded: bytes) -> str:
    message = proton.Message()
    message.decode(encoded)
    try:
        return str(json.loads(bytes(message.body))["id"])
    except (ValueError, KeyError, TypeError):
        return ""


def _opened(encoded: bytes) -> tuple[Any, list[bytes]]:
    """Return the part of a message before its data sections, as a message, and the data."""
    inner, envelope_sections, rest = [], b"", encoded
    while rest:
        data = proton.Data()
        size = data.decode(rest)
        section, rest = rest[:size], rest[size:]
        data.next()
        described = data.get_py_described()
        if int(described.descriptor) == _DATA_SECTION:
            inner.append(bytes(described.value))
        else:
            envelope_sections += section
    envelope = proton.Message()
    envelope.decode(envelope_sections + b"\x00\x53\x77\x40")  # a null for a body: the real one is in pieces
    return envelope, inner


def _text(value: object) -> str | None:
    if value is None or value == "":
        return None
    return value.decode() if isinstance(value, bytes) else str(value)
