"""Returns the identity and the time of the current boot.

On Linux, the kernel generates a UUID at each boot. On Windows, the agent uses the boot time instead. Because the
measured time varies slightly, boot times that differ by at most two minutes count as the same boot.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_LINUX = Path("/proc/sys/kernel/random/boot_id")
_TIME = "time:"
_TOLERANCE_SECONDS = 120.0


def boot_id(path: Path = _LINUX) -> str:
    """Return the identity of the current boot, or "" if it is unknown."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        pass
    if sys.platform == "win32":
        # On Windows, the monotonic clock counts from the boot.
        return f"{_TIME}{time.time() - time.monotonic():.0f}"
    return ""


def seconds_since_boot() -> float:
    """Return the time since the boot, or 0 if it is unknown."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic() if sys.platform == "win32" else 0.0


def has_booted(before: str | None, now: str) -> bool:
    """Return whether *now* is a different boot from *before*, or False if one is unknown."""
    if not before or not now:
        return False
    if before.startswith(_TIME) and now.startswith(_TIME):
        return abs(float(before[len(_TIME) :]) - float(now[len(_TIME) :])) > _TOLERANCE_SECONDS
    return before != now
