"""Checks that only root and the agent's user can change the files that control approvals.

These files are the configuration, the public keys, the state directory, and their parent directories. Anyone who can
change them could replace a key, add a rule, or insert an approval. If another user can change any of them, the agent
does not approve events, but it still receives decisions and stores holds.

If a key file is missing, decisions signed with the key do not count. The agent still starts, because reporting events
is more important than approving them.

If the state directory contains the file ``approvals.disabled``, the agent does not approve any events.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.config.trusted_keys import TrustedKey, unusable_keys
from bridge.events.record import ApprovalResult
from bridge.logs import ThrottledLog
from bridge.outbox.approvals import DISABLED_FILE
from bridge.system.permissions import why_writable

if TYPE_CHECKING:  # `status` uses this module and does not need the metrics
    from bridge.metrics.metrics import Metrics

logger = logging.getLogger(__name__)


def is_disabled(directory: Path) -> bool:
    """Return True if ``approvals.disabled`` is in *directory*, or if the check fails."""
    try:
        (directory / DISABLED_FILE).lstat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def agent_user(directory: Path) -> int:
    """Return the agent's uid. For root, this is the owner of the state *directory*."""
    if sys.platform == "win32":
        return 0
    if os.geteuid() != 0:
        return os.geteuid()
    try:
        return directory.stat().st_uid
    except OSError:
        return 0


def unsafe_files(
    keys: Sequence[TrustedKey], *, configuration: Path | None, directory: Path, users: Collection[int]
) -> tuple[str, ...]:
    """Return a sentence for each file that a user other than root and *users* can change."""
    paths = [directory, *(key.public_key_file for key in keys)]
    with suppress(OSError):  # if no descriptor is free, the agent cannot send a request either
        paths += sorted(directory.glob("outbox-*.db*"))
    if configuration is not None:
        paths.append(configuration)
    found = (why_writable(path, users=users) for path in paths)
    return tuple(dict.fromkeys(why for why in found if why is not None))


class ApprovalFiles:
    """Checks one agent's approval files every few seconds and before each request to Azure."""

    def __init__(
        self, keys: Sequence[TrustedKey], *, configuration: Path | None, directory: Path, metrics: Metrics
    ) -> None:
        self._keys = keys
        self._configuration = configuration
        self._directory = directory
        self._metrics = metrics
        self._log = ThrottledLog(logger)

    def why_disabled(self) -> tuple[ApprovalResult, str] | None:
        """Return why the agent must not send any request, or None if it can send requests."""
        file = self._directory / DISABLED_FILE
        if is_disabled(self._directory):
            self._log.problem("disabled", logging.WARNING, f"Nothing is approved while {file} exists.")
            message = (
                f"Nothing is approved while the file {DISABLED_FILE} is in the state directory. After you delete the "
                "file, the agent sends pending approvals."
            )
            return ApprovalResult.DISABLED, message
        self._log.recovered("disabled", f"The file {file} was deleted. Approvals are possible again.")
        unsafe = self._unsafe()
        if not unsafe:
            return None
        message = f"Nothing is approved. {' '.join(unsafe)} After that, the agent sends pending approvals."
        return ApprovalResult.UNSAFE_FILES, message

    def check(self) -> None:
        """Log each problem when it begins and when it ends, and update the metrics."""
        unsafe = self._unsafe()
        self._tell(
            "unsafe",
            [f"Nothing is approved: {why}" for why in unsafe],
            "No other user can change the approval files now.",
        )
        unusable = unusable_keys(self._keys)
        self._tell(
            "keys",
            [f"{why} Decisions with this key do not count." for why in unusable],
            "All key files are valid again.",
        )
        self._metrics.approval_files(unsafe=len(unsafe), unusable_keys=len(unusable))

    def _unsafe(self) -> tuple[str, ...]:
        users = {0 if sys.platform == "win32" else os.geteuid()}
        return unsafe_files(self._keys, configuration=self._configuration, directory=self._directory, users=users)

    def _tell(self, key: str, problems: Sequence[str], recovered: str) -> None:
        if problems:
            self._log.problem(key, logging.ERROR, " ".join(problems))
        else:
            self._log.recovered(key, recovered)
