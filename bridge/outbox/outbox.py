"""The durable outbox: what was observed, and what each sink is still owed.

One document is handled whole, in one transaction: the believed document, its records, one pending row for each
(record, sink that wants it). So a crash leaves either all of it or none, and none is seen again with the next poll,
under the same ids.

While this VM's identity was never known, records wait in the outbox without sinks (`identify`, `stop_waiting`): who
they concern, and their very ids, depend on it.

Every method hands its work to the one thread that owns the database and returns a Future.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any

from bridge.clock import parse_time, utc_now
from bridge.events.event import Incarnation, VmIdentity
from bridge.events.record import TransitionRecord
from bridge.outbox import approvals, begun, deliveries
from bridge.outbox.approvals import ApprovalState, DecisionUpdate, PendingApproval, StoredDecision
from bridge.outbox.approvals import Outcome as ApprovalOutcome
from bridge.outbox.begun import Beginning
from bridge.outbox.deliveries import OutboxTotals, Outcome, PendingDelivery
from bridge.outbox.meta import Stored, read_state, remember_liveness
from bridge.outbox.records import Observation, RecordWriter, Router
from bridge.outbox.retention import clean
from bridge.outbox.storage import Storage
from bridge.outbox.writer import DatabaseThread

__all__ = ["Beginning", "Observation", "Outbox", "OutboxTotals", "Outcome", "PendingDelivery", "Router", "Stored"]


class Outbox:
    """The agent's outbox in *directory*; at most *max_bytes*, delivered records kept *keep_delivered_seconds*."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        keep_delivered_seconds: float,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._keep_seconds = keep_delivered_seconds
        self._now = now
        self._scribe = RecordWriter(now=now)
        self._writer = DatabaseThread(lambda: self._open(Storage(directory, max_bytes=max_bytes, now=now)))
        self.on_records: Callable[[], None] = lambda: None
        """Called on the writing thread after rows may have been added; must be quick."""

    # What the poller writes.

    def state(self) -> Future[Stored]:
        """Read what was believed when the agent last wrote."""
        return self._writer.read(lambda store: read_state(store.connection))

    def commit(self, observation: Observation) -> Future[list[TransitionRecord]]:
        """Store *observation* whole; raise StreamChanged when the outbox was started over since."""
        return self._told(self._writer.write(lambda store: self._scribe.commit(store, observation)))

    def save_liveness(self, *, last_good_at: datetime, boot_id: str) -> Future[None]:
        """Remember when IMDS last answered, and under which boot."""
        return self._writer.write(lambda store: remember_liveness(store.connection, last_good_at, boot_id))

    def heartbeat(self, *, incarnation: Incarnation) -> Future[list[TransitionRecord]]:
        """Add a heartbeat record for the sinks that want it."""
        return self._told(self._writer.write(lambda store: self._scribe.heartbeat(store, incarnation)))

    # Who is told.

    def configure(self, router: Router, sinks: Collection[str], *, labels: dict[str, str]) -> Future[None]:
        """Choose sinks by *router* from now on; a new one gets the last record of each active event."""
        return self._told(self._writer.write(lambda store: self._scribe.configure(store, router, sinks, labels)))

    def await_identity(self) -> None:
        """Let records wait for `identify`: this VM's name was never known."""
        self._scribe.is_waiting = True

    def identify(self, vm: VmIdentity) -> Future[bool]:
        """Take *vm* as this machine; return whether the outbox was another machine's and was started over."""
        was_foreign = self._writer.alone(lambda store: self._scribe.leave_foreign(store, vm))

        def identify(store: Storage) -> bool:
            self._scribe.identify(store, vm)
            return was_foreign.result()

        return self._told(self._writer.write(identify))

    def stop_waiting(self) -> Future[None]:
        """Choose sinks without the identity: it did not come in time."""
        return self._told(self._writer.write(self._scribe.stop_waiting))

    # What the workers read and write.

    def due(
        self,
        sink: str,
        *,
        limit: int,
        skip: Collection[int] = (),
        blocked: Collection[str] = (),
        after: int = 0,
        per_event: int | None = None,
    ) -> Future[list[PendingDelivery]]:
        """Read up to *limit* rows owed to *sink*, urgent events first, each event's in sequence.

        Rows in *skip* (sequences), rows up to *after* (a sequence) and events in *blocked* (event keys) are left out.
        With *per_event*, up to *limit* events and up to so many rows of each.
        """
        skipped, waiting = frozenset(skip), frozenset(blocked)
        return self._writer.read(
            lambda store: deliveries.due(store, sink, limit, skipped, waiting, after=after, per_event=per_event)
        )

    def probe(
        self,
        sink: str,
        *,
        skip: Collection[int] = (),
        blocked: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> Future[list[PendingDelivery]]:
        """Read the one row to try a paused sink with: urgent, then least often tried, then oldest."""
        skipped, waiting = frozenset(skip), frozenset(blocked)
        chosen = None if only is None else frozenset(only)
        return self._writer.read(lambda store: deliveries.probe(store, sink, skipped, waiting, only=chosen))

    def settle(self, sink: str, outcomes: Sequence[Outcome]) -> Future[None]:
        """Write down what became of records."""
        now = self._now().timestamp()
        return self._writer.write(lambda store: deliveries.settle(store, sink, outcomes, now))

    def expire(self, sink: str, *, max_age_seconds: float) -> Future[int]:
        """Give up on rows older than *max_age_seconds*; return how many."""
        now = self._now().timestamp()
        return self._writer.write(lambda store: deliveries.expire(store, sink, now, max_age_seconds))

    def begin(self, sink: str, event_key: str) -> Future[Beginning]:
        """Mark that *sink* is about to be sent something of the event; or give up what is over and never began."""
        now = self._now().timestamp()
        return self._writer.write(lambda store: begun.begin(store, sink, event_key, now))

    def forget_beginning(self, sink: str, event_key: str) -> Future[None]:
        """Note that nothing of the event reached *sink*, or that it knows the end."""
        return self._writer.write(lambda store: begun.forget(store, sink, event_key))

    def urgency(self, sink: str) -> Future[tuple[bool, float | None]]:
        """Read whether *sink* is owed an urgent row, and the soonest NotBefore still ahead (seconds since 1970)."""
        now = self._now().timestamp()
        return self._writer.read(lambda store: deliveries.urgency(store, sink, now))

    def nudges(self, sink: str) -> Future[int]:
        """Read how often a person asked to try *sink* again."""
        return self._writer.read(lambda store: deliveries.nudges(store, sink))

    def totals(self) -> Future[dict[str, dict[str, int]]]:
        """Read sink -> total by state, all from one commit."""
        return self._writer.read(deliveries.totals)

    def account(self) -> Future[OutboxTotals]:
        """Read what every sink has and is owed, and how full the outbox is, all from one commit."""
        return self._writer.read(deliveries.account)

    # What approvals read and write.

    def made_at(self) -> Future[datetime]:
        """Read when this database was made; what was decided before that does not count."""
        return self._writer.read(lambda store: parse_time(approvals.made_at(store)))

    def keep_decisions(self, decisions: Sequence[StoredDecision]) -> Future[list[str]]:
        """Keep decisions; return new, known, replayed or too_old for each. OutboxReadOnly while in memory."""
        return self._writer.write(lambda store: approvals.keep_decisions(store, decisions))

    def is_known(self, *, approver: str, decision_id: str, payload_sha256: str) -> Future[bool]:
        """Read whether exactly this decision of the portal was kept before."""
        return self._writer.read(
            lambda store: approvals.is_known(
                store, approver=approver, decision_id=decision_id, payload_sha256=payload_sha256
            )
        )

    def approvals(self) -> Future[ApprovalState]:
        """Read what is open."""
        return self._writer.read(approvals.read_approvals)

    def write_approvals(
        self,
        stream_id: str,
        *,
        consents: Sequence[PendingApproval] = (),
        settled: Sequence[DecisionUpdate] = (),
        outcomes: Sequence[ApprovalOutcome] = (),
        incarnation: Incarnation,
    ) -> Future[list[TransitionRecord]]:
        """Write what became of approvals, and its records, in one transaction. OutboxReadOnly while in memory."""

        def write(store: Storage) -> list[TransitionRecord]:
            approvals.write_approvals(store, stream_id, consents=consents, settled=settled)
            return self._scribe.outcomes(store, outcomes, incarnation)

        return self._told(self._writer.write(write))

    def begin_posting(self, stream_id: str, consents: Sequence[PendingApproval]) -> Future[list[PendingApproval]]:
        """Count an attempt for each of *consents* that may be posted now, and return those."""
        now = self._now().timestamp()
        return self._writer.write(lambda store: approvals.begin_posting(store, stream_id, consents, now))

    def tell_outcomes(
        self, outcomes: Sequence[ApprovalOutcome], *, incarnation: Incarnation
    ) -> Future[list[TransitionRecord]]:
        """Add records about decisions of which nothing is kept, also while in memory."""
        return self._told(self._writer.write(lambda store: self._scribe.outcomes(store, outcomes, incarnation)))

    def prune_approvals(self, active_event_ids: Collection[str]) -> Future[None]:
        """Forget decisions and approvals whose time is long over."""
        now = self._now().timestamp()
        return self._writer.write(lambda store: approvals.prune(store, active_event_ids, now))

    def last_record(self, event_key: str) -> Future[TransitionRecord | None]:
        """Read the last record of an event."""
        return self._writer.read(lambda store: deliveries.last_record(store, event_key))

    # Housekeeping.

    @property
    def in_memory(self) -> bool:
        """Return whether the disk refuses, so that what is kept would not survive the agent."""
        return self._store.in_memory

    @property
    def last_sequence(self) -> int:
        """Return the sequence of the newest record; it may be ahead of its commit."""
        return self._scribe.last_sequence

    def tend(self) -> Future[None]:
        """Go back to the disk if it takes writes again, else make sure the file is still ours."""

        def tend(store: Storage) -> None:
            before = store.connection
            if store.return_to_disk():
                store.check_file()
            if store.connection is not before:
                self._told(self._writer.write(self._scribe.catch_up))

        return self._writer.alone(tend)

    def clean(self) -> Future[int]:
        """Delete records that nobody is owed and whose time is over; return how many."""
        before = self._now().timestamp() - self._keep_seconds
        return self._writer.write(lambda store: clean(store, before=before, limit=500))

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Commit what was handed in, and close the file; return whether that was done in time."""
        return self._writer.close(timeout_seconds)

    def _open(self, store: Storage) -> Storage:
        self._store = store
        self._scribe.open(store)
        return store

    def _told(self, future: Future[Any]) -> Future[Any]:
        future.add_done_callback(lambda _: self.on_records())
        return future
