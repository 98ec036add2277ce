"""Who approves in this agent: the approver, and the portal's channel that brings it decisions.

One approver ends before another may start on the same decisions. Half of the agents approve nothing, and need not pay
1 MB for what checks signatures: so both are imported only where there is an `[approval]` table.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.config.approval import ApprovalSettings
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox
from bridge.system.threads import run_daemon

if TYPE_CHECKING:
    from bridge.approval.approver import Approver
    from bridge.approval.portal_poller import PortalPoller

_LOOK_SECONDS = 0.05
_JOIN_SECONDS = 1.0


class ApprovalService:
    """Approves for the VM that *vm* returns; with *on_request_only* no rule begins anything and no portal is asked."""

    def __init__(
        self, outbox: Outbox, metrics: Metrics, *, vm: Callable[[], VmIdentity], directory: Path, on_request_only: bool
    ) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._vm = vm
        self._directory = directory
        self._on_request_only = on_request_only
        self._settings: ApprovalSettings | None = None
        self._channel: PortalPoller | None = None
        self.approver: Approver | None = None
        """Null where nothing is ever approved."""

    def make(self, settings: ApprovalSettings | None, imds: ImdsClient) -> None:
        """Make the approver that *settings* ask for; the one before must have ended."""
        self._settings = settings
        self._metrics.watch_approved(lambda: 0.0)
        if settings is None or settings.remote is None:
            self._metrics.forget_approval_channel()
        self.approver = None if settings is None else self._approver(settings, imds)

    def _approver(self, settings: ApprovalSettings, imds: ImdsClient) -> Approver:
        from bridge.approval.approver import Approver  # noqa: PLC0415

        return Approver(
            settings,
            self._outbox,
            imds,
            vm=self._vm,
            directory=self._directory,
            metrics=self._metrics,
            on_request_only=self._on_request_only,
        )

    def start(self) -> None:
        """Begin to approve, and to ask the portal if there is one."""
        if self.approver is None:
            return
        self.approver.start()
        remote = None if self._settings is None else self._settings.remote
        if remote is not None and not self._on_request_only:
            from bridge.approval.portal_poller import PortalPoller  # noqa: PLC0415

            self._channel = PortalPoller(
                remote,
                vm_id=lambda: self._vm().vm_id,
                offer=self.approver.offer,
                metrics=self._metrics.approval_channel(),
            )
            self._channel.start()

    def nudge(self) -> None:
        """Tell the approver that a command has written to the outbox."""
        if self.approver is not None:
            self.approver.nudge()

    def stop(self) -> None:
        """Begin nothing any more; what is under way ends in `join`. The portal's channel may take a second to end."""
        if self.approver is not None:
            self.approver.stop()
        if self._channel is not None:
            self._channel.stop()
            self._channel = None

    def join(self, timeout_seconds: float) -> None:
        """Wait for the approver's end."""
        if self.approver is not None:
            self.approver.join(timeout_seconds)

    def join_or_stop(self, post_seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until what is posted has its answer, for which it may take *post_seconds*, or until *stop* says so."""
        if self.approver is None:
            return
        wait_seconds = post_seconds * 1.1 + _JOIN_SECONDS
        joined = run_daemon("reload", self.approver.join, wait_seconds)
        while not stop() and not wait([joined], _LOOK_SECONDS).done:
            pass
