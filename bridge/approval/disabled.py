"""The file that stops every approval of a VM at once: while it lies in the state directory, nothing is approved."""

from __future__ import annotations

from pathlib import Path

DISABLED_FILE = "approvals.disabled"


def is_disabled(file: Path) -> bool:
    """Return whether *file* is there; what cannot be told is there, so that in doubt nothing is approved."""
    try:
        file.lstat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True
