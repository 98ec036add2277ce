"""Creates stream IDs: a UUIDv7 at each start, which sorts after all earlier stream IDs."""

from __future__ import annotations

import secrets
import uuid
from datetime import datetime

_VERSION_7 = 7
_LATEST_MILLISECONDS = 2**48 - 1


def new_stream_id(now: datetime, after: str | None) -> str:
    """Return a UUIDv7 for the time *now*. It sorts after the stream ID *after*, if any."""
    milliseconds = max(int(now.timestamp() * 1000), _milliseconds(after) + 1)
    value = min(milliseconds, _LATEST_MILLISECONDS) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | _VERSION_7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def _milliseconds(stream_id: str | None) -> int:
    try:
        value = uuid.UUID(stream_id or "")
    except ValueError:
        return -1
    return value.int >> 80 if value.version == _VERSION_7 else -1
