"""The outbox of the agent: the state in memory, its lock, and the saver.

    rows = outbox.select("webhook", choose)

Every method takes the lock for microseconds and does no I/O, so the poll, the workers, and the approver never wait for
the disk or for one another. A record is due when it is saved, and at the latest 0.5 s after its arrival. An approval
waits until everything about it is saved (`wait_saved`).

State that was stored before a boot may have come with another machine's image. Until the identity of this VM is
confirmed, the outbox is not trusted: stored rows are not sent, and the stored document is not compared.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from bridge.clock import REAL_CLOCK, Clock, format_time, parse_time
from bridge.events.event import Document, Incarnation, ScheduledEvent, VmIdentity, encode
from bridge.events.record import Transition, TransitionRecord
from bridge.events.stream import new_stream_id
from bridge.events.transitions import Change
from bridge.logs import ThrottledLog
from bridge.outbox import approvals, deliveries, records, retention
from bridge.outbox.approvals import DISABLED_FILE
from bridge.outbox.database import Loaded
from bridge.outbox.deliveries import DeliveryResult
from bridge.outbox.records import RecordContext, Routing
from bridge.outbox.rows import ApprovalRecord, Delivery
from bridge.outbox.saver import Saver
from bridge.outbox.state import DueRows, State, StoredState, stored_state
from bridge.system.boot import has_booted

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: A record that is not saved by then is sent all the same.
DUE_SECONDS = 0.5
#: Imported rows have negative sequences, because they are older than all others.
_FIRST = -(2**62)


class Outbox:
    """The outbox in *directory*.

    *max_bytes* limits the files, *max_pending_bytes* the bodies that sinks need. *boot_id* is the identity of this
    boot. *configured_vm_id* is the vmId in the configuration. With *has_portal*, nothing is approved until the portal
    has responded from index 0. *claim*: see `Saver`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int = 256 * 1024 * 1024,
        max_pending_bytes: int = 32 * 1024 * 1024,
        keep_delivered_seconds: float = 7 * 86_400.0,
        clock: Clock = REAL_CLOCK,
        boot_id: str = "",
        configured_vm_id: str | None = None,
        has_portal: bool = False,
        claim: Callable[[], object] = lambda: None,
    ) -> None:
        self.directory = directory
        self.max_bytes, self.max_pending_bytes = max_bytes, max_pending_bytes
        self.on_due: Callable[[], None] = lambda: None
        """Called after records may have become due, from any thread; must be quick."""
        self.active_event_ids: tuple[str, ...] | None = None
        """The announced events, for records that no document causes."""
        self.awaits_portal = has_portal
        """True until the portal has given all of its decisions since the start."""
        self.is_trusted = False
        """False while the stored state may belong to another machine."""
        self.epoch = 0
        """Rises when the state of another machine is replaced by an empty state."""
        self._has_portal = has_portal
        self.clock = clock
        self._boot_id, self._configured_vm_id = boot_id, configured_vm_id
        self._lock = threading.Lock()
        self._state = State()
        self._context = RecordContext()
        self._urgent: list[ScheduledEvent] = []
        self._arrivals: deque[tuple[int, int, float]] = deque()
        self._due_through = self._notified_through = 0
        self._sending: dict[str, frozenset[int]] = {}
        self._newest_document_sequence = 1
        self._log = ThrottledLog(logger)
        self.saver = Saver(
            directory,
            self._state,
            self._lock,
            max_bytes=max_bytes,
            keep_history_seconds=keep_delivered_seconds,
            on_loaded=self._take_loaded,
            on_saved=self._saved,
            make_room=self._make_room_on_disk,
            claim=claim,
            now=clock.timestamp,
        )

    # Start and stop.

    def wait_loaded(self, seconds: float | None = None) -> bool:
        """Wait until the stored state is in memory; return whether it is."""
        return self.saver.loaded.wait(seconds)

    def close(self, seconds: float = 5.0) -> bool:
        """Save everything and close the file; return whether that took at most *seconds*."""
        return self.saver.close(seconds)

    def _take_loaded(self, loaded: Loaded) -> None:
        """Begin a new stream with the loaded state; on the saver's thread, with the lock held."""
        state, now = self._state, self.clock.now()
        state.put("stream_id", new_stream_id(now, state.get("stream_id")))
        if state.get("created_at") is None:
            state.put("created_at", format_time(now))
        self._due_through = self._notified_through = state.loaded_through
        self._newest_document_sequence = state.next_sequence
        stored = stored_state(self._state)
        self.is_trusted = self._is_own(stored)
        if stored.vm is not None and self.is_trusted:
            self._context = msgspec.structs.replace(self._context, vm=stored.vm)
        if loaded.is_damaged:
            self._report_damage(loaded)
        self._state.version += 1

    def _is_own(self, stored: StoredState) -> bool:
        vm_id = None if stored.vm is None else stored.vm.vm_id
        if vm_id is None or _same(vm_id, self._configured_vm_id):
            return True
        known_boot = self._state.get("vm_boot_id") or stored.boot_id
        return bool(known_boot) and not has_booted(known_boot, self._boot_id)

    def _report_damage(self, loaded: Loaded) -> None:
        """Drop open approvals, and stop approvals altogether if a hold may be lost that no portal sends again."""
        for key in list(self._state.approvals.rows):
            self._state.approvals.delete(key)
        logger.error(
            "The outbox file is damaged. All readable rows are kept, and open approvals are dropped.",
            extra={
                "file": None if loaded.file is None else loaded.file.name,
                "missing": {name: "unknown" if count is None else count for name, count in loaded.missing.items()},
                "unreadable": [path.name for path in loaded.unreadable],
            },
        )
        if (loaded.unreadable or "decisions" in loaded.missing) and not self._has_portal:
            logger.error("A hold may be lost. Nothing is approved until you delete the file %s.", DISABLED_FILE)
            with suppress(OSError):
                (self.directory / DISABLED_FILE).touch()

    # Changes and the saver.

    @contextmanager
    def _change(self, *, soon: bool = True, notifies: bool = True) -> Iterator[State]:
        """Hold the lock for a change; wake the saver, with *soon* False in 0.2 s. New records may call `on_due`."""
        with self._lock:
            before = self._state.next_sequence
            yield self._state
            self._state.version += 1
            has_new = self._state.next_sequence > before
            if has_new:
                arrival = (self._state.next_sequence - 1, self._state.version, self.clock.monotonic())
                self._arrivals.append(arrival)
                excess = self._state.needed_bytes - self.max_pending_bytes
                if excess > 0:
                    self._evict(excess, "state.max_pending_bytes")
        self.saver.wake(soon=soon)
        if has_new and notifies:
            self.on_due()

    def _make_room_on_disk(self, excess_bytes: int) -> None:
        with self._change(soon=False):
            self._evict(excess_bytes, "state.max_bytes")

    def _evict(self, excess_bytes: int, limit: str) -> None:
        sending = frozenset[int]().union(*self._sending.values())
        newest, now = self._newest_document_sequence, self.clock.timestamp()
        if retention.make_room(self._state, excess_bytes, newest=newest, sending=sending, now=now):
            message = f"The outbox is full: undelivered records are evicted. Fix the sink, or raise {limit}."
            self._log.problem(limit, logging.ERROR, message)

    def wait_saved(self, seconds: float) -> bool:
        """Save now; return whether every change made before this call is saved within *seconds*."""
        return self.saver.wait_saved(seconds)

    @property
    def is_behind(self) -> bool:
        """Return whether the file lacks changes because the disk fails or hangs: nothing is approved meanwhile."""
        return self.saver.behind_reason is not None

    def _saved(self) -> None:
        with self._lock:
            before, self._notified_through = self._notified_through, self._advance_due()
        if self._notified_through != before:  # a worker may have advanced it already, for all of them
            self.on_due()

    # Identity.

    def use_vm(self, vm: VmIdentity, *, is_waiting: bool = False) -> None:
        """Use *vm* for new records without confirming the stored state; with *is_waiting*, they wait for a call."""
        with self._change() as state:
            self._context = msgspec.structs.replace(self._context, vm=vm, is_waiting=is_waiting)
            if self.is_trusted:
                records.route_waiting(state, self._context)
        self.on_due()

    def identify(self, vm: VmIdentity) -> bool:
        """Take *vm* as this machine; return whether the stored state was another machine's and was replaced."""
        with self._change() as state:
            stored = stored_state(self._state).vm
            before = None if stored is None else stored.vm_id
            is_foreign = bool(vm.vm_id and before) and not _same(vm.vm_id, before)
            self._context = msgspec.structs.replace(self._context, vm=vm, is_waiting=False)
            if is_foreign:
                records.start_empty(state, self.clock.now())
                self.epoch += 1
                self.awaits_portal = True
            state.put("vm", encode(vm).decode())
            state.put("vm_boot_id", self._boot_id or None)
            self.is_trusted = True
            records.configure(state, self._context)
        if is_foreign:
            logger.warning("The stored state belongs to another machine. The agent starts with an empty outbox.")
        self.on_due()
        return is_foreign

    # Records.

    def configure(
        self,
        router: records.Router,
        sinks: Iterable[str],
        *,
        labels: Mapping[str, str],
        current_state_only: Collection[str] = (),
    ) -> None:
        """Route new records by *router*; a new sink receives the last record of every active event."""
        with self._change() as state:
            routing = Routing(
                router=router,
                sinks=tuple(sinks),
                labels=dict(labels),
                current_state_only=frozenset(current_state_only),
            )
            self._context = msgspec.structs.replace(self._context, routing=routing)
            records.configure(state, self._context)
        self.on_due()

    def append_observation(
        self, document: Document, changes: Sequence[Change], *, active_event_ids: tuple[str, ...] | None
    ) -> list[TransitionRecord]:
        """Store *document*, to be tracked from now on, and the records of *changes*.

        *active_event_ids* are the announced events after these changes. The caller calls `on_due` if the records become
        due without a save.
        """
        with self._change(notifies=False) as state:
            self.active_event_ids = active_event_ids
            if changes:
                self._newest_document_sequence = state.next_sequence
            state.put("document", encode(document).decode())
            facts = [msgspec.structs.asdict(change) for change in changes]
            new = [records.new_record(**each, active_event_ids=active_event_ids) for each in facts]
            return records.append(state, new, self._context)

    def append_urgent(self, document: Document, now: datetime) -> list[TransitionRecord]:
        """Record the urgent events of *document*, once each, while the outbox is not trusted."""
        with self._change() as state:
            new = [event for event in document.events if event.is_urgent and event not in self._urgent]
            self._urgent += new
            return records.append(state, [records.of_urgent(event, document, now) for event in new], self._context)

    def append_heartbeat(self, *, incarnation: Incarnation) -> list[TransitionRecord]:
        """Add a heartbeat for the sinks that request heartbeats."""
        with self._change() as state:
            new = records.new_record(
                Transition.HEARTBEAT,
                self.clock.now(),
                incarnation=incarnation,
                previous_incarnation=incarnation,
                active_event_ids=self.active_event_ids,
            )
            return records.append(state, [new], self._context)

    def append_outcomes(
        self,
        outcomes: Sequence[ApprovalRecord],
        *,
        incarnation: Incarnation,
        first: Callable[[State], object] = lambda _state: None,
    ) -> list[TransitionRecord]:
        """Apply *first*, and add a record for each outcome of an approval, in one change."""
        with self._change() as state:
            first(state)
            new = [
                records.new_record(
                    outcome.transition,
                    self.clock.now(),
                    event=outcome.event,
                    incarnation=incarnation,
                    previous_incarnation=incarnation,
                    active_event_ids=self.active_event_ids,
                    approval=msgspec.structs.replace(
                        outcome.approval, jws_sha256=approvals.token_digests(state, outcome.arrivals)
                    ),
                )
                for outcome in outcomes
            ]
            return records.append(state, new, self._context)

    @property
    def stream_id(self) -> str:
        """Return the stream of this run."""
        with self._lock:
            return self._state.get("stream_id") or ""

    # Deliveries.

    def select(self, sink: str, choose: Callable[[DueRows], Sequence[Delivery]]) -> list[Delivery]:
        """Return the rows that the pure function *choose* picks from the due rows of *sink*.

        They count as being sent, and so are not evicted, until `record_results` or the next call.
        """
        with self._lock:
            state = self._state
            after = _FIRST if self.is_trusted else state.loaded_through
            chosen = list(choose(DueRows(state.queue(sink), after=after, through=self._advance_due())))
            self._sending[sink] = frozenset(row.sequence for row in chosen)
            return chosen

    def seconds_to_due(self) -> float:
        """Return the seconds until a record that is not saved becomes due; infinity if all records are due."""
        with self._lock:
            self._advance_due()
            if not self._arrivals:
                return math.inf
            return max(self._arrivals[0][2] + DUE_SECONDS - self.clock.monotonic(), 0.0)

    def _advance_due(self) -> int:
        """Return the last sequence that is due: saved, or 0.5 s old."""
        saved, now = self.saver.saved_version, self.clock.monotonic()
        while self._arrivals and (self._arrivals[0][1] <= saved or now - self._arrivals[0][2] >= DUE_SECONDS):
            self._due_through = self._arrivals.popleft()[0]
        return self._due_through

    def record_results(
        self, sink: str, results: Sequence[DeliveryResult], *, accepted_under: str | None = None
    ) -> None:
        """Store the results of a send."""
        with self._change(soon=False) as state:
            self._sending.pop(sink, None)
            now = self.clock.timestamp()
            deliveries.record_results(state, sink, results, now=now, accepted_under=accepted_under)

    def created_at(self) -> datetime:
        """Return when the outbox was created: an approval that was issued earlier is refused.

        A time in the future, from a clock that was ahead, becomes the present time.
        """
        with self._change(soon=False) as state:
            now = self.clock.now()
            created_at = min(parse_time(state.get("created_at") or format_time(now)), now)
            state.put("created_at", format_time(created_at))
            return created_at

    # Everything else is a pure function over the state.

    def read(self, work: Callable[Concatenate[State, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what *work*, which changes nothing, returns for the state and these arguments."""
        with self._lock:
            return work(self._state, *args, **kwargs)

    def change(self, work: Callable[Concatenate[State, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Change the state by *work* and save the change; return what *work* returns."""
        with self._change() as state:
            result = work(state, *args, **kwargs)
        self.on_due()  # *work* may have made older records pending
        return result


def _same(one: str | None, other: str | None) -> bool:
    """Return whether both are the same vmId."""
    return bool(one and other) and (one or "").lower() == (other or "").lower()
