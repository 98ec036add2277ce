"""Approval service: builds, starts and stops the approver, and the poller that brings it decisions from the portal.

One approver ends before another may start on the same decisions. Half of the agents approve nothing, and need not pay
1 MB for what checks signatures: so the approver is imported only where there is an `[approval]` table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.clock import REAL_CLOCK, Clock
from bridge.config.approval import ApprovalSettings, RemoteSettings
from bridge.config.trusted_keys import TrustedKey, unusable_keys
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.metrics.metrics import Metrics, own_version
from bridge.outbox.outbox import Outbox
from bridge.system.threads import LoopWatch, run_daemon

if TYPE_CHECKING:
    from bridge.approval.approver import Approver
    from bridge.approval.files import ApprovalFiles
    from bridge.approval.portal_poller import PortalPoller

_STOP_POLL_SECONDS = 0.05
_JOIN_SECONDS = 1.0
#: Servers take 8 KiB of headers; a longer list of names is left out.
_MOST_HEADER_CHARACTERS = 4_096


def agent_header(settings: ApprovalSettings, keys: Sequence[TrustedKey], *, version: str, is_disabled: bool) -> str:
    """Return what an agent says of itself with each request to the portal: a JSON object in ASCII (PROTOCOL.md 2).

    Whether a decision would be followed here, and how. *keys* are those of *settings*, whose files are looked at.
    """
    about: dict[str, object] = {
        "version": version,
        "required_approvals": 1 if settings.remote is None else settings.remote.required_approvals,
        "dry_run": settings.dry_run,
        "disabled": is_disabled,
    }
    whole = _compact({**about, "kids": [key.kid for key in keys if not unusable_keys([key])]})
    return whole if len(whole) <= _MOST_HEADER_CHARACTERS else _compact(about)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


class ApprovalService:
    """Approves for the VM that *vm* returns; *directory* is the state directory.

    With *on_request_only* no rule begins anything, no portal is asked, and of what is open nothing else is posted: a
    person wants one approval.
    """

    def __init__(
        self,
        outbox: Outbox,
        metrics: Metrics,
        *,
        vm: Callable[[], VmIdentity],
        directory: Path,
        on_request_only: bool = False,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._vm = vm
        self._directory = directory
        self._on_request_only = on_request_only
        self._clock = clock
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
        """Build what *settings* ask for, to be started by `start`; what was built before must have ended.

        *configuration* is the file they were read from. No command of a rule gets one of the *secret_variables* of this
        process. A request by *imds* takes *imds_timeout_seconds* at most.
        """
        self._configuration = configuration
        self._secret_variables = secret_variables
        self._imds_timeout_seconds = imds_timeout_seconds
        remote = None if settings is None else settings.remote
        self._metrics.watch_approved(lambda: 0.0)
        if remote is None:
            self._metrics.forget_approval_channel()
        self._files = None
        self._metrics.approval_files(unsafe=0, unusable_keys=0)
        self.approver = None if settings is None else self._build_approver(settings, imds)
        self.check_files()
        self._portal_poller = None
        if settings is not None and remote is not None and self.approver is not None and not self._on_request_only:
            self._portal_poller = self._build_portal_poller(settings, remote, self.approver, imds)

    def _build_approver(self, settings: ApprovalSettings, imds: ImdsClient) -> Approver:
        from bridge.approval.approver import Approver  # noqa: PLC0415
        from bridge.approval.files import ApprovalFiles  # noqa: PLC0415
        from bridge.approval.inbox import DecisionInbox  # noqa: PLC0415
        from bridge.approval.off_switch import OffSwitch  # noqa: PLC0415
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
            rules=None if self._on_request_only else RuleEngine(settings, vm=self._vm, clock=clock),
            submitter=Submitter(
                imds, self._directory, why_unsafe=files.why_unsafe, dry_run=settings.dry_run, clock=clock
            ),
            off_switch=OffSwitch(self._directory, self._outbox),
            portal_taken=lambda: None if self._portal_poller is None else self._portal_poller.taken,
            portal_read=lambda: None if self._portal_poller is None else self._portal_poller.read_whole,
            metrics=self._metrics,
            secret_variables=self._secret_variables,
            imds_timeout_seconds=self._imds_timeout_seconds,
            clock=clock,
        )

    def _build_portal_poller(
        self, settings: ApprovalSettings, remote: RemoteSettings, approver: Approver, imds: ImdsClient
    ) -> PortalPoller:
        from bridge.approval.portal_client import PortalClient  # noqa: PLC0415
        from bridge.approval.portal_poller import JITTER_SECONDS, PortalPoller  # noqa: PLC0415
        from bridge.approval.submit import is_disabled  # noqa: PLC0415

        vm, keys, version = self._vm, remote.trusted_keys(), own_version()  # keys of its own: for another thread
        return PortalPoller(
            PortalClient(
                remote,
                document=imds.attested_document,
                agent=lambda: agent_header(settings, keys, version=version, is_disabled=is_disabled(self._directory)),
            ),
            vm_id=lambda: vm().vm_id,
            receive=approver.receive,
            database=lambda: self._outbox.created_at,
            metrics=self._metrics.approval_channel(),
            first_within_seconds=JITTER_SECONDS,
            clock=self._clock,
        )

    @property
    def loop_watches(self) -> Mapping[str, LoopWatch]:
        """The watches over the loops of the approver and of the way to the portal, where there are any."""
        loops = {"approver": self.approver, "portal": self._portal_poller}
        return {name: loop.loop_watch for name, loop in loops.items() if loop is not None}

    def check_files(self) -> None:
        """Look whether every key can be used, and whether others may write to what approvals rest on; log what not."""
        if self._files is not None:
            self._files.check()

    def start(self) -> None:
        """Begin to approve, and to ask the portal if there is one."""
        if self.approver is not None:
            self.approver.start()
        if self._portal_poller is not None:
            self._portal_poller.start()

    def wake(self) -> None:
        """Have the approver run at once: a command has written to the outbox."""
        if self.approver is not None:
            self.approver.wake()

    def stop(self) -> None:
        """Begin nothing any more; what is under way ends in `join`. The portal poller may take a second to end."""
        if self.approver is not None:
            self.approver.stop()
        if self._portal_poller is not None:
            self._portal_poller.stop()
            self._portal_poller = None

    def join(self, timeout_seconds: float) -> None:
        """Wait for the approver's end."""
        if self.approver is not None:
            self.approver.join(timeout_seconds)

    def drain(self, post_seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until what is posted has its answer, for which it may take *post_seconds*, or until *stop* is true."""
        if self.approver is None:
            return
        wait_seconds = post_seconds * 1.1 + _JOIN_SECONDS
        joined = run_daemon("reload", self.approver.join, wait_seconds)
        while not stop() and not wait([joined], _STOP_POLL_SECONDS).done:
            pass
