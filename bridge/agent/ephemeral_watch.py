"""Says, once, when the state directory would not survive a redeploy of the VM, and shows it as a metric.

What the disks say is known at start, and whether the OS disk is an ephemeral one only when IMDS has answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from bridge.metrics.metrics import Metrics
from bridge.system.ephemeral_disk import why_ephemeral

logger = logging.getLogger(__name__)


class EphemeralWatch:
    """Looks at *directory*; *os_disk_is_ephemeral* returns what IMDS says, null while it has not."""

    def __init__(self, directory: Path, metrics: Metrics, os_disk_is_ephemeral: Callable[[], bool | None]) -> None:
        self._directory = directory
        self._metrics = metrics
        self._os_disk_is_ephemeral = os_disk_is_ephemeral
        self._is_first = True
        self._known: bool | None = None
        self._said: str | None = None

    def look(self) -> None:
        """Look again if IMDS says anything new; cheap otherwise."""
        told = self._os_disk_is_ephemeral()
        if not self._is_first and (told is None or told == self._known):
            return
        self._is_first, self._known = False, told
        why = why_ephemeral(self._directory, os_disk_is_ephemeral=told)
        self._metrics.state_is_ephemeral(is_ephemeral=why is not None)
        if why is not None and why != self._said:
            logger.warning("%s", why)
        self._said = why
