"""Pads AMQP frames so that every performative has all fields, as Event Hubs sends them.

A list can omit trailing nulls (AMQP 1.0 part 1, section 1.4), and proton omits them. The Python SDK reads fields by
position and fails with "list index out of range" on such frames, so this module rewrites the output of proton.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_NULL = b"\x40"
_HEADER_BYTES = 8
_AMQP_FRAME = 0
#: The number of fields of each performative (AMQP 1.0 part 2, section 2.7), by descriptor.
_FIELD_COUNTS = {0x10: 10, 0x11: 8, 0x12: 14, 0x13: 11, 0x14: 11, 0x15: 6, 0x16: 3, 0x17: 1, 0x18: 1}


class Padder:
    """Rewrites a byte stream that can be split anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, written: bytes) -> bytes:
        """Return the complete frames of the buffer and *written*, padded."""
        self._rest += written
        return b"".join(self._frames())

    def _frames(self) -> Iterator[bytes]:
        while len(self._rest) >= _HEADER_BYTES:
            if self._rest.startswith(b"AMQP"):
                yield self._taken(_HEADER_BYTES)
                continue
            size = struct.unpack(">I", self._rest[:4])[0]
            if len(self._rest) < size:
                return
            yield _padded(self._taken(size))

    def _taken(self, size: int) -> bytes:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _padded(frame: bytes) -> bytes:
    """Return *frame* with a list32 of all fields. SASL frames and empty frames are unchanged."""
    offset = frame[4] * 4
    if frame[5] != _AMQP_FRAME or len(frame) == offset:
        return frame
    performative, code = frame[offset + 2], frame[offset + 3]
    fields, count, payload = _fields(frame[offset + 4 :], code)
    wanted = max(count, _FIELD_COUNTS[performative])
    fields += _NULL * (wanted - count)
    listed = b"\xd0" + struct.pack(">II", len(fields) + 4, wanted) + fields
    body = frame[4:offset] + frame[offset : offset + 3] + listed + payload
    return struct.pack(">I", len(body) + 4) + body


def _fields(rest: bytes, code: int) -> tuple[bytes, int, bytes]:
    """Return the encoded fields of a list, their number, and the rest after the list."""
    if code == 0x45:
        return b"", 0, rest
    if code == 0xC0:
        size = rest[0]
        return rest[2 : 1 + size], rest[1], rest[1 + size :]
    size, count = struct.unpack(">II", rest[:8])
    return rest[8 : 4 + size], count, rest[4 + size :]
