"""Which boot this is, and since when: a VM that booted once an event could start has been through it.

Linux names each boot by a UUID. Windows has no such name; there it is the time of the boot, which two readings tell a
little differently, hence the tolerance.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_LINUX = Path("/proc/sys/kernel/random/boot_id")
_TIME = "time:"
_TOLERANCE_SECONDS = 120.0


def boot_id(path: Path = _LINUX) -> str:
    """Return what names the current boot; "" where the system does not tell."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        pass
    if sys.platform == "win32":
        # On Windows the monotonic clock counts from the boot.
        return f"{_TIME}{time.time() - time.monotonic():.0f}"
    return ""


def seconds_since_boot() -> float:
    """Return how long ago the current boot was; 0 where the system does not tell."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic() if sys.platform == "win32" else 0.0


def has_booted(before: str | None, now: str) -> bool:
    """Return whether *now* is another boot than *before*; False when either is unknown."""
    if not before or not now:
        return False
    if before.startswith(_TIME) and now.startswith(_TIME):
        return abs(float(before[len(_TIME) :]) - float(now[len(_TIME) :])) > _TOLERANCE_SECONDS
    return before != now
