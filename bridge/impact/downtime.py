"""Measures the downtime of a reboot from a stamp on disk.

While an event of this VM is near (about to start, or started), the agent writes a stamp with the current time once a
second. It overwrites the same file and syncs it each time, so a host crash loses at most the last stamp.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from bridge.events.record import DowntimeParts, Impact
from bridge.system.boot import boot_id, has_booted

_FILE = "last-sign-of-life"
#: The interval between two stamps, and the time that a sync may take.
UNCERTAINTY_SECONDS = 1.5
_BYTES = 128
_STOPPING_SECONDS = 1.0


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The last moment at which the agent was known to run."""

    at: float
    """Unix seconds."""
    boot_id: str


class Downtime(msgspec.Struct, frozen=True, kw_only=True):
    """The Unix times of the last stamp, of the boot after it, and of the agent's start."""

    last_alive_at: float
    booted_at: float
    agent_at: float

    def added_to(self, impact: Impact) -> Impact:
        """Return *impact* with this downtime."""
        return msgspec.structs.replace(
            impact,
            downtime_seconds=round(self.agent_at - self.last_alive_at, 3),
            downtime_uncertainty_seconds=UNCERTAINTY_SECONDS,
            # A boot before the last sign of life shows that the clock was not set correctly at the boot.
            downtime_parts=None
            if self.booted_at < self.last_alive_at
            else DowntimeParts(
                until_kernel_seconds=round(self.booted_at - self.last_alive_at, 3),
                until_agent_seconds=round(self.agent_at - self.booted_at, 3),
            ),
        )


def downtime_after(
    stamp: Stamp | None, *, current_boot_id: str, now: float, seconds_since_boot: float, is_ephemeral: bool
) -> Downtime | None:
    """Return the downtime before this start of the agent.

    Returns None if the VM has not booted since *stamp* was written, or if a redeploy would delete the state directory.
    """
    if stamp is None or is_ephemeral or not has_booted(stamp.boot_id, current_boot_id) or now < stamp.at:
        return None
    return Downtime(last_alive_at=stamp.at, booted_at=now - seconds_since_boot, agent_at=now)


def read_stamp(directory: Path) -> Stamp | None:
    """Return the stamp in *directory*, or None if it is missing or damaged."""
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes().strip(), type=Stamp)
    except (OSError, msgspec.MsgspecError):
        return None


def write_stamp(directory: Path, stamp: Stamp) -> None:
    """Write *stamp* and sync it. Ignore errors."""
    text = msgspec.json.encode(stamp).ljust(_BYTES)
    with suppress(OSError):
        descriptor = os.open(directory / _FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, text, 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def stamp_stop(directory: Path, *, is_near: bool) -> None:
    """If the VM is shutting down while an event is near, write a last stamp.

    Otherwise, delete the stamp, because any other stop of the agent does not count as downtime.
    """
    if is_near and is_shutting_down():
        write_stamp(directory, Stamp(at=time.time(), boot_id=boot_id()))
        return
    with suppress(OSError):
        (directory / _FILE).unlink(missing_ok=True)


def is_shutting_down() -> bool:
    """Return whether the system is shutting down. Without systemd, return False."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["systemctl", "is-system-running"]
        answer = subprocess.run(command, capture_output=True, timeout=_STOPPING_SECONDS, check=False)  # noqa: S603 - fixed
        return answer.stdout.strip() == b"stopping"
    return False
