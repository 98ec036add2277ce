"""The outbox: the agent's state, a lock that protects the state, and the saver thread.

No thread does I/O while holding the lock, so a slow disk does not delay the poller, the sinks, or the approver.

A sink can send a record once the record is saved, or after 0.5 s if the disk is slow. The agent sends an approval to
Azure only after `wait_saved` confirms that the approval is saved.

A VM created from another VM's image contains the other VM's state. After each boot, the agent therefore ignores the
stored state until IMDS returns the vmId. If the vmId is different, `Outbox.identify` deletes the state.
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
from bridge.events.event import Document, VmIdentity, encode
from bridge.events.record import TransitionRecord
from bridge.events.stream import new_stream_id
from bridge.logs import ThrottledLog
from bridge.outbox import deliveries, records, retention
from bridge.outbox.approvals import DISABLED_FILE
from bridge.outbox.database import Loaded
from bridge.outbox.records import RecordContext
from bridge.outbox.rows import Delivery, DeliveryState
from bridge.outbox.saver import Saver
from bridge.outbox.state import DueRows, State
from bridge.system.boot import has_booted

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DUE_SECONDS = 0.5


class Outbox:
    """Keeps the agent's state in memory, and saves a copy in *directory*.

    *max_bytes* limits the size of the files in *directory*. *max_pending_bytes* limits the total size of undelivered
    records in memory. *configured_vm_id* is the `vm.vm_id` setting. The saver calls *claim* before it creates a file.
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
        """Any thread calls this function when records might be due. The function must return quickly."""
        self.active_event_ids: tuple[str, ...] | None = None
        """The EventIds of the open events. None means that the open events are unknown."""
        self.is_trusted = False
        """False while the stored state might belong to another machine."""
        self.portal_read_in: str | None = None
        """The `stream_id` during which the portal has sent all of its decisions to this run of the agent."""
        self._has_portal = has_portal
        self.clock = clock
        self._boot_id, self._configured_vm_id = boot_id, configured_vm_id
        self._lock = threading.Lock()
        self._state = State()
        self._context = RecordContext()
        self._arrivals: deque[tuple[int, float]] = deque()
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

    def wait_loaded(self, seconds: float | None = None) -> bool:
        """Wait until the stored state is loaded. Return False if this takes longer than *seconds*."""
        return self.saver.loaded.wait(seconds)

    def close(self, seconds: float = 5.0) -> bool:
        """Save all changes and close the file. Return False if this takes longer than *seconds*."""
        return self.saver.close(seconds)

    def _take_loaded(self, loaded: Loaded) -> None:
        """Start a new stream with the loaded state.

        The saver thread calls this method while it holds the lock.
        """
        state, now = self._state, self.clock.now()
        state.put("stream_id", new_stream_id(now, state.get("stream_id")))
        if state.get("created_at") is None:
            state.put("created_at", format_time(now))
        self._due_through = self._notified_through = state.loaded_through
        self._newest_document_sequence = state.next_sequence
        self.is_trusted = self._is_own(state.vm)
        if state.vm is not None and self.is_trusted:
            self._context = msgspec.structs.replace(self._context, vm=state.vm)
        if loaded.is_damaged:
            self._report_damage(loaded)

    def _is_own(self, vm: VmIdentity | None) -> bool:
        if vm is None or vm.vm_id is None or _same(vm.vm_id, self._configured_vm_id):
            return True
        known_boot = self._state.get("vm_boot_id") or self._state.get("boot_id")
        return bool(known_boot) and not has_booted(known_boot, self._boot_id)

    def _report_damage(self, loaded: Loaded) -> None:
        """Report that the outbox file is damaged, and delete all approvals.

        The method also disables approvals if a hold might be lost and no portal can send the hold again.
        """
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
            logger.error(
                "A hold might be lost, so the agent approves nothing. To allow approvals again, delete the file %s.",
                DISABLED_FILE,
            )
            with suppress(OSError):
                (self.directory / DISABLED_FILE).touch()

    @contextmanager
    def _change(self, *, soon: bool = True, notifies: bool = True) -> Iterator[State]:
        """Lock the state while the caller changes it. Then request a save and wake the workers.

        If *soon* is False, the save can be delayed by up to 0.2 s, and the workers are not woken.
        """
        with self._lock:
            before = self._state.next_sequence
            yield self._state
            if self._state.next_sequence > before:
                self._arrivals.append((self._state.next_sequence - 1, self.clock.monotonic()))
                excess = self._state.needed_bytes - self.max_pending_bytes
                if excess > 0:
                    self._evict(excess, "state.max_pending_bytes")
        self.saver.wake(soon=soon)
        if soon and notifies:
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
        """Start a save. Return True if all earlier changes are saved within *seconds*."""
        return self.saver.wait_saved(seconds)

    @property
    def stream_id(self) -> str:
        """Return the stream's ID, which changes if another machine's state is deleted."""
        return self.read(lambda state: state.get("stream_id") or "")

    @property
    def is_behind(self) -> bool:
        """Return whether the disk fails or hangs. While it does, the agent approves no events."""
        return self.saver.behind_reason is not None

    def _saved(self) -> None:
        with self._lock:
            before, self._notified_through = self._notified_through, self._advance_due()
        if self._notified_through != before:  # otherwise, a worker has already sent the records
            self.on_due()

    def use_vm(self, vm: VmIdentity) -> None:
        """Use *vm* for new records. The stored state stays unconfirmed."""
        with self._lock:
            self._context = msgspec.structs.replace(self._context, vm=vm)

    def identify(self, vm: VmIdentity) -> bool:
        """Confirm that *vm* is this VM. If the state belongs to another VM, delete it.

        Return whether the state was deleted.
        """
        with self._change() as state:
            before = None if state.vm is None else state.vm.vm_id
            is_foreign = bool(vm.vm_id and before) and not _same(vm.vm_id, before)
            self._context = msgspec.structs.replace(self._context, vm=vm)
            if is_foreign:
                records.start_empty(state, self.clock.now())
            state.put("vm", encode(vm).decode())
            state.put("vm_boot_id", self._boot_id or None)
            self.is_trusted = True
            records.add_sinks(state, self._context)
        if is_foreign:
            logger.warning("The stored state belongs to another machine. The agent starts with an empty outbox.")
        return is_foreign

    def configure(
        self,
        router: records.Router,
        sinks: Iterable[str],
        *,
        labels: Mapping[str, str],
        current_state_only: Collection[str] = (),
    ) -> None:
        """Use *router* for new records, and give new sinks the latest record of each active event."""
        with self._change() as state:
            self._context = RecordContext(
                vm=self._context.vm,
                router=router,
                sinks=tuple(sinks),
                labels=dict(labels),
                current_state_only=frozenset(current_state_only),
            )
            records.add_sinks(state, self._context)
            deliveries.expire_outdated(state, self._context.current_state_only, list(state.events.rows))

    def move(self, old: str, new: str) -> int:
        """Move the undelivered records of the sink *old* to *new*, and return their number."""
        only, now = self._context.current_state_only, self.clock.timestamp()
        return self.change(deliveries.move, old, new, now=now, current_state_only=only)

    def append_observation(
        self, document: Document | None, new: Sequence[TransitionRecord], *, active_event_ids: tuple[str, ...] | None
    ) -> list[TransitionRecord]:
        """Store *document* unless it is None, and add the records in *new* (see `append`).

        *active_event_ids* contains the EventIds of all events that are open after this change. If the new records are
        not saved within `DUE_SECONDS`, the caller must call `on_due`, so that the sinks send the records anyway.
        """
        with self._change(notifies=False) as state:
            self.active_event_ids = active_event_ids
            if new:
                self._newest_document_sequence = state.next_sequence
            if document is not None:
                state.put("document", encode(document).decode())
            return records.append(state, new, self._context, active_event_ids)

    def append(
        self, new: Sequence[TransitionRecord], *, first: Callable[[State], object] = lambda _state: None
    ) -> list[TransitionRecord]:
        """Give the records in *new* their IDs and sequences, add them, and return them.

        The method first calls *first*, which can change the state. One transaction saves all changes.
        """
        with self._change() as state:
            first(state)
            return records.append(state, new, self._context, self.active_event_ids)

    def select(self, sink: str, choose: Callable[[DueRows], Sequence[Delivery]]) -> list[Delivery]:
        """Return the rows that the pure function *choose* selects from the due rows of *sink*.

        The selected records are not evicted before the next call to `select` or `record_results` for this sink.
        """
        with self._lock:
            state = self._state
            after = -math.inf if self.is_trusted else state.loaded_through
            chosen = list(choose(DueRows(state.queues[sink], after=after, through=self._advance_due())))
            self._sending[sink] = frozenset(row.sequence for row in chosen)
            return chosen

    def seconds_to_due(self) -> float:
        """Return the seconds until the next unsaved record is due, or infinity if all are saved."""
        with self._lock:
            self._advance_due()
            if not self._arrivals:
                return math.inf
            return max(self._arrivals[0][1] + DUE_SECONDS - self.clock.monotonic(), 0.0)

    def _advance_due(self) -> int:
        saved, now = self.saver.saved_through, self.clock.monotonic()
        while self._arrivals and (self._arrivals[0][0] <= saved or now - self._arrivals[0][1] >= DUE_SECONDS):
            self._due_through = self._arrivals.popleft()[0]
        return self._due_through

    def record_results(self, sink: str, sequences: Iterable[int], to: DeliveryState, **details: str | None) -> None:
        """Store the result of a send (see `deliveries.record_results`)."""
        with self._change(soon=False) as state:
            self._sending.pop(sink, None)
            deliveries.record_results(state, sink, sequences, to, now=self.clock.timestamp(), **details)

    def created_at(self) -> datetime:
        """Return the creation time of the outbox. A future time is replaced by the current time."""
        with self._change(soon=False) as state:
            now = self.clock.now()
            created_at = min(parse_time(state.get("created_at") or format_time(now)), now)
            state.put("created_at", format_time(created_at))
            return created_at

    def read(self, work: Callable[Concatenate[State, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call *work* with the state, and return its result. *work* must not change the state."""
        with self._lock:
            return work(self._state, *args, **kwargs)

    def change(self, work: Callable[Concatenate[State, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call *work* with the state, and return its result. The saver thread saves the changes."""
        with self._change() as state:
            return work(state, *args, **kwargs)


def _same(one: str | None, other: str | None) -> bool:
    return bool(one and other) and (one or "").lower() == (other or "").lower()
