"""Approval service: builds, starts, and stops the approver and the portal poller.

An approver ends before the next one starts on the same decisions. The approver is imported only if the configuration
has an `[approval]` table, because the verification of signatures needs 1 MB of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.clock import REAL_CLOCK, Clock
from bridge.config.approval import ApprovalSettings, RemoteSettings
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.metrics.metrics import Metrics, own_version
from bridge.outbox.outbox import Outbox
from bridge.system.threads import LoopWatch

if TYPE_CHECKING:
    from bridge.approval.approver import Approver
    from bridge.approval.files import ApprovalFiles
    from bridge.approval.portal_poller import PortalPoller

_STOP_POLL_SECONDS = 0.05
_JOIN_SECONDS = 1.0


class ApprovalService:
    """Approves for the VM that *vm* returns; *directory* is the state directory."""

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
        self._configuration: Path | None = None
        self._secret_variables: Collection[str] = ()
        self._imds_timeout_seconds = 5.0
        self._files: ApprovalFiles | None = None
        self._portal_poller: PortalPoller | None = None
        self.approver: Approver | None = None
        """None where nothing is ever approved."""

    def configure(
        self,
        settings: ApprovalSettings | None,
        imds: ImdsClient,
        *,
        configuration: Path | None = None,
        secret_variables: Collection[str] = (),
        imds_timeout_seconds: float = 5.0,
    ) -> None:
        """Build the approver and the portal poller of *settings*. Those of the last configuration must have ended.

        *configuration* is the configuration file. Commands do not receive the environment's *secret_variables*. A
        request by *imds* takes at most *imds_timeout_seconds*.
        """
        self._configuration = configuration
        self._secret_variables = secret_variables
        self._imds_timeout_seconds = imds_timeout_seconds
        remote = None if settings is None else settings.remote
        self._metrics.watch_approved(lambda: 0.0)
        if remote is None:
            self._metrics.forget_approval_channel()
            self._outbox.awaits_portal = False
        elif remote.url != self._portal_url:  # another portal may have holds that the agent does not know
            self._outbox.awaits_portal = True
        self._portal_url = None if remote is None else remote.url
        self._files = None
        self._metrics.approval_files(unsafe=0, unusable_keys=0)
        self.approver = None if settings is None else self._build_approver(settings, imds)
        self.check_files()
        self._portal_poller = None
        if settings is not None and remote is not None and self.approver is not None:
            self._portal_poller = self._build_portal_poller(settings, remote, self.approver, imds)

    def _build_approver(self, settings: ApprovalSettings, imds: ImdsClient) -> Approver:
        from bridge.approval.approver import Approver  # noqa: PLC0415
        from bridge.approval.files import ApprovalFiles  # noqa: PLC0415
        from bridge.approval.inbox import DecisionInbox  # noqa: PLC0415
        from bridge.approval.rules import RuleEngine  # noqa: PLC0415
        from bridge.approval.submit import Submitter  # noqa: PLC0415

        clock = self._clock
        keys = settings.trusted_keys()
        self._files = files = ApprovalFiles(
            keys, configuration=self._configuration, directory=self._directory, metrics=self._metrics
        )
        return Approver(
            settings,
            self._outbox,
            inbox=DecisionInbox(keys, self._outbox, vm=self._vm, clock=clock),
            rules=RuleEngine(settings, vm=self._vm, clock=clock),
            submitter=Submitter(
                imds, self._directory, why_unsafe=files.why_unsafe, dry_run=settings.dry_run, clock=clock
            ),
            portal_read=lambda: None if self._portal_poller is None else self._portal_poller.read_epoch,
            metrics=self._metrics,
            secret_variables=self._secret_variables,
            imds_timeout_seconds=self._imds_timeout_seconds,
            clock=clock,
        )

    def _build_portal_poller(
        self, settings: ApprovalSettings, remote: RemoteSettings, approver: Approver, imds: ImdsClient
    ) -> PortalPoller:
        from bridge.http.lean_requests import import_requests  # noqa: PLC0415

        import_requests()
        from bridge.approval.portal_client import PortalClient, agent_header  # noqa: PLC0415
        from bridge.approval.portal_poller import JITTER_SECONDS, PortalPoller  # noqa: PLC0415

        keys = remote.trusted_keys()  # not the approver's keys, because the poller has another thread
        return PortalPoller(
            PortalClient(
                remote,
                document=imds.attested_document,
                agent=partial(agent_header, settings, keys, version=own_version(), directory=self._directory),
            ),
            vm=self._vm,
            receive=approver.receive,
            outbox_epoch=partial(attrgetter("epoch"), self._outbox),
            metrics=self._metrics.approval_channel(),
            first_within_seconds=JITTER_SECONDS,
            clock=self._clock,
        )

    @property
    def loop_watches(self) -> Mapping[str, LoopWatch]:
        """Return the watches of the loops of the approver and the portal poller."""
        loops = {"approver": self.approver, "portal": self._portal_poller}
        return {name: loop.loop_watch for name, loop in loops.items() if loop is not None}

    def check_files(self) -> None:
        """Check and log whether every key is usable, the permissions of all files are safe, and approvals enabled."""
        if self._files is not None:
            self._files.check()
        self.wake()

    def start(self) -> None:
        """Start the approver and the portal poller."""
        if self.approver is not None:
            self.approver.start()
        if self._portal_poller is not None:
            self._portal_poller.start()

    def wake(self) -> None:
        """Let the approver run at once, because a command has changed the state."""
        if self.approver is not None:
            self.approver.wake()

    def stop(self) -> None:
        """Begin to stop; see `join`. The portal poller may need a second to end."""
        if self.approver is not None:
            self.approver.stop()
        if self._portal_poller is not None:
            self._portal_poller.stop()
            self._portal_poller = None

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the approver."""
        if self.approver is not None:
            self.approver.join(timeout_seconds)

    def drain(self, post_seconds: float, stop: Callable[[], bool]) -> None:
        """Wait for the end of the approver, at most *post_seconds* and a margin, or until *stop* returns true."""
        deadline = time.monotonic() + post_seconds * 1.1 + _JOIN_SECONDS
        while self.approver is not None and self.approver.is_running and not stop() and time.monotonic() < deadline:
            self.approver.join(_STOP_POLL_SECONDS)
