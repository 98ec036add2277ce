"""Creates, starts, and stops the approver thread and the portal poller thread.

On a reload, the old approver stops before the new one starts, because both use the same decisions. Without an
`[approval]` table, the agent does not import the approver, which saves 1 MB of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.clock import REAL_CLOCK, Clock
from bridge.config.approval import ApprovalSettings, RemoteSettings
from bridge.config.settings import Settings
from bridge.events.event import VmIdentity
from bridge.events.otel_resource import own_version
from bridge.imds.client import ImdsClient
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox
from bridge.system.threads import LoopWatch

if TYPE_CHECKING:
    from bridge.approval.approver import Approver
    from bridge.approval.portal_poller import PortalPoller


class ApprovalService:
    """Manages the approvals of a VM.

    *vm* returns the VM's identity, and *directory* is the agent's state directory.
    """

    def __init__(
        self,
        outbox: Outbox,
        metrics: Metrics,
        *,
        vm: Callable[[], VmIdentity],
        directory: Path,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._vm = vm
        self._directory = directory
        self._clock = clock
        self._portal_url: str | None = None
        self._portal_poller: PortalPoller | None = None
        self.approver: Approver | None = None
        """None if the configuration has no `[approval]` table."""

    def configure(self, settings: Settings, imds: ImdsClient) -> None:
        """Create the approver and the portal poller. The previous threads must have ended."""
        approval = settings.approval
        remote = None if approval is None else approval.remote
        self._metrics.watch_approved(lambda: 0.0)
        if remote is None:
            self._metrics.forget_approval_channel()
        elif remote.url != self._portal_url:  # another portal may have holds that the agent has not received
            self._outbox.portal_read_in = None
        self._portal_url = None if remote is None else remote.url
        self._metrics.approval_files(unsafe=0, unusable_keys=0)
        self._portal_poller = self.approver = None
        if approval is None:
            return
        from bridge.approval.approver import Approver  # noqa: PLC0415

        self.approver = Approver(
            settings,
            approval,
            self._outbox,
            imds,
            vm=self._vm,
            directory=self._directory,
            portal_read=lambda: None if self._portal_poller is None else self._portal_poller.read_in,
            metrics=self._metrics,
            clock=self._clock,
        )
        self.check_files()
        if remote is not None:
            self._portal_poller = self._build_portal_poller(approval, remote, self.approver, imds)

    def _build_portal_poller(
        self, approval: ApprovalSettings, remote: RemoteSettings, approver: Approver, imds: ImdsClient
    ) -> PortalPoller:
        from bridge.http.lean_requests import import_requests  # noqa: PLC0415

        import_requests()
        from bridge.approval.portal_client import PortalClient, agent_header  # noqa: PLC0415
        from bridge.approval.portal_poller import JITTER_SECONDS, PortalPoller  # noqa: PLC0415

        keys = remote.trusted_keys()  # separate from the approver's keys, because the poller runs on another thread
        return PortalPoller(
            PortalClient(
                remote,
                document=imds.attested_document,
                agent=partial(agent_header, approval, keys, version=own_version(), directory=self._directory),
            ),
            vm=self._vm,
            receive=approver.receive,
            stream_id=partial(getattr, self._outbox, "stream_id"),
            metrics=self._metrics.approval_channel(),
            first_within_seconds=JITTER_SECONDS,
            clock=self._clock,
        )

    @property
    def loop_watches(self) -> Mapping[str, LoopWatch]:
        """Return the loop watches of the approver and the portal poller, by name."""
        loops = {"approver": self.approver, "portal": self._portal_poller}
        return {name: loop.loop_watch for name, loop in loops.items() if loop is not None}

    def check_files(self) -> None:
        """Check and log problems with key files and file permissions."""
        if self.approver is not None:
            self.approver.files.check()
            self.approver.wake()

    def start(self) -> None:
        """Start the approver and the portal poller."""
        if self.approver is not None:
            self.approver.start()
        if self._portal_poller is not None:
            self._portal_poller.start()

    def wake(self) -> None:
        """Wake the approver, because a command has changed the state."""
        if self.approver is not None:
            self.approver.wake()

    def stop(self) -> None:
        """Stop the portal poller within a second, and signal the approver to stop."""
        if self.approver is not None:
            self.approver.stop()
        if self._portal_poller is not None:
            self._portal_poller.stop()
            self._portal_poller = None

    def join(self, timeout_seconds: float) -> None:
        """Wait up to *timeout_seconds* until the approver has ended."""
        if self.approver is not None:
            self.approver.join(timeout_seconds)
