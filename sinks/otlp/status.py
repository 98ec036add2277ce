"""The error of an OTLP receiver in words: a google.rpc.Status, which a Collector sends as protobuf.

Read by hand: its message is in none of the packages that the agent has, and the format of two fields is twenty lines.

Sources: OTLP Specification, "OTLP/HTTP Response, Failures"; Protocol Buffers, "Encoding"; google/rpc/status.proto.
"""

from __future__ import annotations

_CODE, _MESSAGE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_VARINT = 10
#: gRPC, "Status codes and their use in gRPC".
_NAMES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


def status_text(content: bytes) -> str | None:
    """Return the message and the code of the Status in *content*; None when it is none."""
    code, message = 0, ""
    try:
        position = 0
        while position < len(content):
            key, position = _varint(content, position)
            field, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, position = _varint(content, position)
                code = value if field == _CODE else code
                continue
            size, position = (_FIXED_BYTES[kind], position) if kind != _BYTES else _varint(content, position)
            end = position + size
            if end > len(content):
                return None
            message = content[position:end].decode() if (field, kind) == (_MESSAGE, _BYTES) else message
            position = end
    except (IndexError, KeyError, UnicodeDecodeError):
        return None
    return f"{message} ({_name(code)})".strip() if message or code else None


def _name(code: int) -> str:
    return _NAMES[code] if code < len(_NAMES) else f"code {code}"


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the number at *position*, and where it ends; raise IndexError when it does not end."""
    value = 0
    for number in range(_LONGEST_VARINT):
        byte = content[position + number]
        value |= (byte & 0x7F) << (7 * number)
        if not byte & 0x80:
            return value, position + number + 1
    raise IndexError
