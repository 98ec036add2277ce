"""An approver under test with a manual clock, a metadata service that records requests, and new keys."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import msgspec
from outbox_kit import RouteAll
from signed_decisions import sign_decision
from waiting import until

from bridge.approval.approver import Approver
from bridge.approval.service import ApprovalService
from bridge.approval.signing import generate_key
from bridge.cli.approve import cli_decision
from bridge.clock import Clock, Instant
from bridge.config.approval import ApprovalSettings, KeySettings, RemoteSettings, RuleSettings
from bridge.config.settings import Settings
from bridge.events.event import Document, ScheduledEvent, VmIdentity
from bridge.events.record import Transition, TransitionRecord, new_record
from bridge.imds.client import ImdsClient
from bridge.metrics.metrics import Metrics
from bridge.outbox import approvals
from bridge.outbox.outbox import Outbox
from bridge.outbox.retention import forget_old
from bridge.outbox.rows import ApprovalState, PendingApproval, StoredDecision

VM_ID = "542afd79-4f70-5562-aa13-70d60565ec97"
START = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
ANNE, BORIS = "anne", "boris"
_UNTIL_SECONDS, _TURN_SECONDS = 20.0, 0.02


class NotingImds:
    """Returns a document and accepts StartRequests, or raises the exceptions `answer` and `get_answer`."""

    def __init__(self) -> None:
        self.document = Document(incarnation=1)
        self.requests: list[str] = []
        self.posts: list[list[str]] = []
        self.answer: Exception | None = None
        self.get_answer: Exception | None = None
        self.on_post: Any = None
        self.on_get: Any = None

    def shows(self, *events: ScheduledEvent) -> None:
        """Return *events* from now on."""
        self.document = Document(incarnation=int(str(self.document.incarnation)) + 1, events=events)

    def scheduled_events_again(self) -> Document:
        self.requests.append("GET")
        if self.on_get is not None:
            self.on_get()
        if self.get_answer is not None:
            raise self.get_answer
        return self.document

    def attested_document(self, nonce: str) -> str:
        return f"a document for {nonce}"

    def start_requests(self, event_ids: Sequence[str], *, document: Document) -> int:
        del document
        self.requests.append("POST")
        self.posts.append(list(event_ids))
        if self.on_post is not None:
            self.on_post()
        if self.answer is not None:
            raise self.answer
        return 200


class ApproverKit:
    """One VM with its outbox and its approver. `turn` runs one iteration of the approver's thread."""

    outbox: Outbox
    approver: Approver

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.seconds = 0.0
        self.wall_jump_seconds = 0.0
        self.imds = NotingImds()
        self.metrics = Metrics()
        self.vm = VmIdentity(name="vm_0", vm_id=VM_ID)
        self.keys: dict[str, Path] = {}
        self.settings = ApprovalSettings()
        self.disk_is_full = False
        self.document = Document(incarnation=1)
        self.has_started = False

    # Time.

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds + self.wall_jump_seconds)

    def monotonic(self) -> float:
        return 5000.0 + self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    # Configuration.

    def key(self, kid: str) -> Path:
        if kid not in self.keys:
            self.keys[kid] = generate_key(self.directory / f"{kid}.key").private_key_file
        return self.keys[kid]

    def trust(self, *pairs: tuple[str, str], required: int = 1) -> None:
        """Trust keys, each (kid, approver)."""
        keys = tuple(
            KeySettings(kid=kid, approver=approver, public_key_file=f"{self.key(kid)}.pub") for kid, approver in pairs
        )
        remote = RemoteSettings(url="https://portal.invalid", keys=keys, required_approvals=required)
        self.settings = ApprovalSettings(remote=remote)

    def rules(self, *rules: RuleSettings, **options: Any) -> None:
        self.settings = ApprovalSettings(rules=rules, **options)

    # Start and stop.

    def start(self, *, hears_portal: bool = True) -> None:
        """Start an agent. Unless *hears_portal* is False, it has received all decisions of the portal."""
        self.has_started = True
        self.state.mkdir(mode=0o700, exist_ok=True)
        self.outbox = Outbox(
            self.state,
            clock=self.clock,
            boot_id="boot-1",
            has_portal=self.settings.remote is not None,
            claim=self._claim,
        )
        assert self.outbox.wait_loaded(_UNTIL_SECONDS)
        self.outbox.configure(RouteAll("sink"), ["sink"], labels={})
        self.outbox.identify(self.vm)
        self.service = ApprovalService(
            self.outbox, self.metrics, vm=lambda: self.vm, directory=self.state, clock=self.clock
        )
        self.configure()
        if hears_portal:
            self.hear_portal()

    # The disk.

    def _claim(self) -> None:
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def break_disk(self) -> None:
        """Delete the file of the outbox, and leave no space for another one."""
        assert self.outbox.wait_saved(_UNTIL_SECONDS)
        self.disk_is_full = True
        self.delete_files()

    def fill_disk(self) -> None:
        """Break the disk, and wait until the outbox is behind."""
        self.break_disk()
        until(lambda: not self.outbox.wait_saved(0.1) and self.outbox.is_behind)

    def free_disk(self) -> None:
        self.disk_is_full = False
        assert self.outbox.wait_saved(_UNTIL_SECONDS)

    def delete_files(self) -> None:
        for path in self.state.glob("outbox-*"):
            path.unlink()

    @property
    def clock(self) -> Clock:
        return Clock(now=self.now, monotonic=self.monotonic, random=lambda: 0.0)

    def configure(self) -> None:
        self.service.configure(Settings(sinks=(), approval=self.settings), cast(ImdsClient, self.imds))
        assert self.service.approver is not None
        self.approver = self.service.approver

    def hear_portal(self) -> None:
        """Receive all decisions of the portal from index 0."""
        self.outbox.portal_read_in = self.outbox.stream_id

    def restart(self) -> None:
        self.close()
        self.start()

    def reload(self) -> None:
        """Continue with `settings` in another approver on the same outbox, as a reload does."""
        self.approver.stop()
        self.approver.join(5)
        self.configure()
        self.hear_portal()
        self._observe()

    def close(self) -> None:
        if self.has_started:
            self.approver.stop()
            self.approver.join(5)
            self.outbox.close(5)

    # Events and decisions.

    def event(self, event_id: str = "E-1", **fields: Any) -> ScheduledEvent:
        values: dict[str, Any] = {
            "event_type": "Freeze",
            "event_status": "Scheduled",
            "event_source": "Platform",
            "resources": ("vm_0", "vm_1"),
            "not_before": START + timedelta(hours=2),
            "not_before_raw": "Fri, 20 Nov 2026 13:00:00 GMT",
            "duration_seconds": 5,
        }
        return ScheduledEvent(event_id=event_id, **{**values, **fields})

    def see(self, *events: ScheduledEvent, shown: bool = True, **options: Any) -> None:
        """Let the metadata service respond now with *events*. Without *shown*, the next response differs."""
        if events != self.document.events:
            self.document = Document(incarnation=int(str(self.document.incarnation)) + 1, events=events)
        if shown:
            self.imds.document = self.document
        self._observe(**options)

    def _observe(self, **options: Any) -> None:
        instant = Instant(wall=self.now(), monotonic=self.monotonic())
        usual = {"asked_at": instant.monotonic, "unsettled": frozenset(), "tracked": None}
        self.approver.observe(self.document, instant, **{**usual, **options})

    def record(self, *events: ScheduledEvent) -> None:
        """Store *events* as the poll does before it notifies the approver."""
        self.record_change(Transition.SCHEDULED, *events)

    def record_change(self, transition: Transition, *events: ScheduledEvent) -> None:
        changes = [new_record(transition, self.now(), event=event, incarnation=1) for event in events]
        self.outbox.append_observation(self.document, changes, active_event_ids=None)

    def until(self, condition: Callable[[], object]) -> None:
        """Run turns in real time until *condition* is true, because commands of the approver take real time."""
        deadline = time.monotonic() + _UNTIL_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.outcomes
            self._observe()
            self.turn()
            time.sleep(_TURN_SECONDS)

    def prune(self) -> None:
        """Delete old rows, as the agent does once an hour."""
        self.outbox.change(forget_old, self.now().timestamp())

    def turn(self) -> float:
        return self.approver.run_once()

    def go(self, seconds: float, *events: ScheduledEvent) -> None:
        """Let *seconds* pass, with a response and a turn each second."""
        for _ in range(int(seconds)):
            self.wait(1)
            self.see(*events)
            self.turn()

    def token(
        self,
        event: ScheduledEvent,
        decision: str = "approve",
        *,
        kid: str = "k1",
        approver: str = ANNE,
        after: float = 0.0,
        **options: Any,
    ) -> str:
        """Return a decision, issued *after* seconds from now."""
        return sign_decision(
            self.key(kid),
            kid=kid,
            approver=approver,
            vm_id=options.pop("vm_id", VM_ID),
            event=event,
            decision=decision,
            now=self.now() + timedelta(seconds=after),
            **options,
        )

    def offer(self, *tokens: str) -> None:
        self.approver.receive(tokens)
        self.turn()

    def approve_here(
        self, event: ScheduledEvent, overruled: Collection[StoredDecision] = ()
    ) -> tuple[StoredDecision, ...]:
        """Approve *event* like a user on the VM who overrules the holds *overruled*. Return the other holds."""
        moment = self.now().timestamp()
        decision = cli_decision(approver="root", decision_id=f"here-{moment}", event=event)
        decision = msgspec.structs.replace(
            decision, issued_at=int(moment * 1_000_000), expires_at=moment + 120, received_at=moment
        )
        return self.outbox.change(approvals.keep_overruling, decision, [hold.arrival for hold in overruled])

    @property
    def holds(self) -> list[StoredDecision]:
        return [each for each in self.open_decisions if each.verdict.value == "hold"]

    @property
    def approval_state(self) -> ApprovalState:
        return self.outbox.read(approvals.read_state)

    @property
    def open_decisions(self) -> tuple[StoredDecision, ...]:
        return self.approval_state.decisions

    @property
    def held(self) -> set[str]:
        """Return the EventIds that are held."""
        return {each.event_id for each in self.holds if each.state.value == "held"}

    @property
    def approvals(self) -> list[PendingApproval]:
        return list(self.approval_state.approvals.values())

    @property
    def records(self) -> list[TransitionRecord]:
        rows = self.outbox.read(lambda state: dict(state.records.rows))
        return [rows[sequence].record for sequence in sorted(rows)]

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        """Return (transition, result) of each record about an approval."""
        return [(each.transition.value, each.approval.result) for each in self.records if each.approval is not None]
