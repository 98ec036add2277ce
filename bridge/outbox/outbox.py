"""The agent's outbox: one thread that owns the database, and runs on it the functions that others hand in.

    rows = outbox.read(deliveries.due, "webhook", limit=64).result()

A function over the database takes a connection first; what it reads or writes is in `records`, `deliveries`,
`approvals` and `meta`. `read` and `write` hand it to the thread and return a Future, which is done when the work is
committed.

One thread, because a lock around the connection was measured to starve the poll: with 5 ms of fsync its p99 was
250 ms, with one thread and group commit 18 ms. What gathered while the last commit was on its way is committed
together, and so is what several sinks delivered within a moment (`write_soon`). A function that raises something of its
own is rolled back alone. A group that fails because of the disk is done again after `Storage.recover`, so a caller
never sees a disk that is full or damaged.

A commit that has not returned in 2 s is a disk that refuses, too: its thread is left behind, and another goes on from
memory (see `stalls`). It does the group again there, unless that is on the disk by then.

Another program's lock is waited for, since a command of ours is short; one that lasts for two busy timeouts (10 s)
counts as a disk that refuses, or it would stop the poll and every sink.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from datetime import datetime
from enum import Enum
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from bridge.clock import AgeClock, Clock, utc_now
from bridge.errors import OutboxError
from bridge.events.event import VmIdentity
from bridge.logs import ThrottledLog
from bridge.outbox import deliveries, meta, retention
from bridge.outbox.database import BUSY_SECONDS, is_lock, suppress_lock, transaction
from bridge.outbox.deliveries import OutboxTotals
from bridge.outbox.records import RecordWriter
from bridge.outbox.stalls import (
    COMMIT_SECONDS,
    WORK_SECONDS,
    Left,
    StallWatch,
    Turn,
    until_there_are_threads,
)
from bridge.outbox.storage import Storage
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_MOST_IN_A_GROUP = 256
#: Sinks that are told of the same change answer within a few milliseconds of each other.
_SOON_SECONDS = 0.02
_MOST_CLEANED = 500
_TICK_SECONDS = 0.05
#: What the work that gathered may take: other programs' locks and a file that is copied included.
_WORK_SECONDS = 60.0
#: A recovery that does not help, again and again, would fill the disk with files set aside.
_MOST_RECOVERIES = 3
#: The wall clock was set, not only slewed.
_STEP_SECONDS = 2.0
#: Each is a busy timeout of 5 s.
_MOST_LOCKS = 2
#: What a disk or a file that refuses may cost the work that waits; then it goes on from memory, and the rest beside it.
_RECOVERY_SECONDS = 4.0
_JOIN_SECONDS = 0.1
#: An outbox that takes longer to open is spoken of.
_OPENING_SECONDS = 4.0


def result_or_stop(future: Future[T], stop: Callable[[], bool]) -> T | None:
    """Return the result of *future*, or None once *stop* returns True: the outbox may wait 10 s for a lock."""
    while not wait_for([future], _TICK_SECONDS).done:
        if stop():
            return None
    return future.result()


class _Mode(Enum):
    READ = "read"
    WRITE = "write"
    EXCLUSIVE = "exclusive"
    READ_OF_ADDED = "read of added"


class _Job(msgspec.Struct, kw_only=True):
    work: Callable[[Storage], Any]
    mode: _Mode
    future: Future[Any]
    may_wait: bool = False
    """It need not begin at once: others may join its transaction."""


_Outcome = tuple[_Job, Any, Exception | None]
"""A job, and what it returned or raised."""


class Outbox:
    """The outbox in *directory*: at most *max_bytes*, delivered records are kept *keep_delivered_seconds*.

    *claim* is called before a database is made anew there; it raises StateDirectoryError when another agent has it. How
    far its stream came is kept in *runtime*, which outlives the agent but not the boot; None: where the system has such
    a place. *open_storage* opens another storage than the one there. Raises OutboxError when the file there must not be
    used, because a newer version wrote it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        keep_delivered_seconds: float,
        now: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        claim: Callable[[], object] = lambda: None,
        ages: AgeClock | None = None,
        runtime: Path | None = None,
        open_storage: Callable[[], Storage] | None = None,
    ) -> None:
        self._keep_seconds = keep_delivered_seconds
        self._now = now
        self.ages = ages or AgeClock(Clock(now=now, monotonic=lambda: now().timestamp()))
        """The clock by which records age; by default *now*."""
        self.records = RecordWriter(now=now, ages=self.ages)
        """Writes records; its methods are for `write`."""
        self.on_added: Callable[[], None] = lambda: None
        """Called on the outbox's thread after a commit that added deliveries; must be quick."""
        self.on_memory: Callable[[], None] = lambda: None
        """Called, on a thread of the outbox, when it goes on in memory because the disk refuses; must be quick."""
        self.additions = 0
        """How many commits added deliveries."""
        self._reads_of_added: dict[str, _Job] = {}
        self.loop_watch = LoopWatch(Clock(monotonic=monotonic))
        # Not SimpleQueue: with a timeout, that of Python 3.10 may miss a put: the outbox stood still for good.
        self._jobs: Queue[_Job | None] = Queue()
        self._gate = threading.Lock()
        self._is_closed = self._is_drained = False
        self._log = ThrottledLog(logger)
        self._stop = threading.Event()
        self._turn = Turn()
        self._left: list[Turn] = []
        """Those that were left to their threads, and have not ended."""
        opened: Future[Storage] = Future()
        if open_storage is None:
            open_storage = partial(
                Storage, directory, max_bytes=max_bytes, now=now, monotonic=monotonic, claim=claim, runtime=runtime
            )
        self._thread = threading.Thread(target=self._run, args=(open_storage, opened), name="outbox", daemon=True)
        self._thread.start()
        if not wait_for([opened], _OPENING_SECONDS).done:
            logger.warning(
                "The outbox has not opened yet: the disk hangs, another program has the outbox locked, or it is large.",
                extra={"directory": str(directory)},
            )
        self._storage = opened.result()
        self._watch = StallWatch(lambda: self._turn, self._go_on)

    def read(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Run *work*, which only reads, with the connection and these arguments."""
        return self._submit(_Mode.READ, lambda storage: work(storage.connection, *args, **kwargs))

    def read_when_added(
        self, name: str, work: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[tuple[T, int]]:
        """Run *work*, which only reads, at the end of the next transaction that adds deliveries.

        The Future is done once that is committed, before `on_added` is called: a thread that sends what was added need
        not ask for it then, which would take two more wake-ups. It has what *work* returned, and what `additions` is
        from that commit on. A read that is asked for later under the same *name* takes the place of one before. When
        the transaction has to be begun again, the Future is never done.
        """
        job = _Job(
            work=lambda storage: (work(storage.connection, *args, **kwargs), self.additions + 1),
            mode=_Mode.READ_OF_ADDED,
            future=Future(),
        )
        with self._gate:
            self._reads_of_added[name] = job
        return job.future

    def write(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Run *work* in a transaction; the Future is done when that is committed."""
        return self._submit(_Mode.WRITE, lambda storage: work(storage.connection, *args, **kwargs))

    def write_soon(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Do as `write`, in a transaction that waits up to 20 ms for what else is to be written, or for anything else.

        A commit writes whole pages and waits for the disk, so four sinks that take a record in turn cost one, not four.
        """
        return self._submit(_Mode.WRITE, lambda storage: work(storage.connection, *args, **kwargs), may_wait=True)

    def exclusive(self, work: Callable[Concatenate[Storage, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run *work* between two transactions, with the storage: it may exchange the database itself."""
        return self._submit(_Mode.EXCLUSIVE, lambda storage: work(storage, *args, **kwargs))

    def expire(self, sink: str, *, max_age_seconds: float) -> Future[int]:
        """Give up what has been pending for *sink* for longer; return how many records."""
        return self.write(
            lambda connection: deliveries.expire(
                connection, sink, now=self.ages.timestamp(), max_age_seconds=max_age_seconds
            )
        )

    def totals(self) -> Future[tuple[OutboxTotals, float]]:
        """Return every sink's account and how full the outbox is, and the time by which its records age."""
        return self.read(lambda connection: (deliveries.totals(connection), self.ages.timestamp()))

    def identify(self, vm: VmIdentity) -> Future[bool]:
        """Take *vm* as this machine; return whether the outbox was another machine's and was started over."""
        was_foreign = self.exclusive(self.records.reset_if_foreign, vm)

        def identify(connection: sqlite3.Connection) -> bool:
            self.records.identify(connection, vm)
            return was_foreign.result()

        return self.write(identify)

    def tend(self) -> Future[None]:
        """Go back to the disk if it takes writes again, else make sure the file is still ours, and look after it."""

        def tend(storage: Storage) -> None:
            if storage.return_to_disk():
                storage.check_file()
                self._follow_wall_clock(storage)
                storage.checkpoint()

        return self.exclusive(tend)

    def clean(self) -> Future[int]:
        """Delete records that are done with and older than *keep_delivered_seconds*; return how many."""
        before = self._now().timestamp() - self._keep_seconds
        return self.write(retention.delete_expired, before=before, limit=_MOST_CLEANED)

    def take_slow_disk(self) -> None:
        """Go back to a disk that has hung as soon as its call has returned, however slow it is: a stop comes."""
        self._stop.set()

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Commit what was handed in, and close the file; return whether that was done in time."""
        self.take_slow_disk()
        with self._gate:
            self._is_closed = True
            self._jobs.put(None)
        end = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._thread.is_alive() and (left := end - time.monotonic()) > 0:
            self._thread.join(min(left, _JOIN_SECONDS))  # it may be left behind meanwhile, for another
        self._watch.stop()
        return not self._thread.is_alive()

    @property
    def is_committed(self) -> bool:
        """Return whether all that was handed in until `close` is on the disk, though the file may not be closed yet."""
        return self._is_drained and not self._storage.in_memory

    @property
    def in_memory(self) -> bool:
        """Return whether the disk refuses, so that what is kept would not survive the agent."""
        return self._storage.in_memory

    @property
    def stream_id(self) -> str:
        """Return the id of the stream, as of the last commit; another after the outbox was started over."""
        return self._storage.meta["stream_id"]

    @property
    def created_at(self) -> datetime:
        """Return when the database was made, as of the last commit: what was decided earlier does not count.

        A time that the clock has not reached is corrected first, for as long as the clock has not reached it.
        """
        if self._storage.is_creation_to_correct:
            self._submit(_Mode.WRITE, Storage.correct_created_at).result()
        return meta.created_at(self._storage.meta)

    @property
    def awaits_portal(self) -> bool:
        """Return whether holds may be missing that a portal has, since the database was made or rebuilt."""
        return meta.awaits_portal(self._storage.meta)

    @property
    def max_bytes(self) -> int:
        """Return how much the outbox may hold where it is now."""
        return self._storage.max_bytes

    @property
    def set_aside_count(self) -> int:
        """Return how many databases were set aside since the start."""
        return self._storage.set_aside_count

    def _submit(self, mode: _Mode, work: Callable[[Storage], T], *, may_wait: bool = False) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # what was handed in is done: it cannot be cancelled
        with self._gate:
            if self._is_closed:
                raise OutboxError("The outbox is closed.")
            self._jobs.put(_Job(work=work, mode=mode, future=future, may_wait=may_wait))
        return future

    # On the outbox's thread.

    def _follow_wall_clock(self, storage: Storage) -> None:
        """Count ages by the wall clock as it is now, and move what is stored with it, so that no age changes.

        Not in memory: the rows that wait on the disk would stay behind.
        """
        step_seconds = self.ages.step_seconds
        if abs(step_seconds) < _STEP_SECONDS or storage.in_memory:
            return
        with suppress(sqlite3.Error):  # then the next call does it; until then ages are right all the same
            with transaction(storage.connection):
                deliveries.shift_ages(storage.connection, step_seconds)
            self.ages.follow(step_seconds)

    def _run(self, open_storage: Callable[[], Storage], opened: Future[Storage]) -> None:
        try:
            storage = open_storage()
            self.records.begin(storage)
        except BaseException as error:  # noqa: BLE001  # handed to the opener, who waits for it
            opened.set_exception(error)
            return
        opened.set_result(storage)
        self._work(storage, self._turn, [])

    def _work(self, storage: Storage, turn: Turn, left_over: list[_Job]) -> None:
        """Do *left_over*, then what is handed in, until it is time to close or another thread goes on instead."""
        storage.enter_step = turn.enter
        try:
            turn.group = left_over
            while turn.group or (group := self._gather()):
                turn.group = turn.group or group
                for is_exclusive, jobs in groupby(turn.group, key=lambda job: job.mode is _Mode.EXCLUSIVE):
                    self._do_jobs(storage, turn, list(jobs), is_exclusive=is_exclusive)
                turn.group = []
        except Left:
            turn.has_returned.set()
            storage.abandon(self._stop)
            turn.ended.set()
        except BaseException:
            storage.close()
            raise
        else:
            self._is_drained = True
            storage.enter_step = lambda _limit_seconds: None
            self._await_slow_disk()
            storage.close()

    def _await_slow_disk(self) -> None:
        """Give calls that hang a moment to return, for what is in memory would be lost; and those that did, longer."""
        for left in self._left:
            if not left.has_returned.wait(2 * COMMIT_SECONDS):
                return
            left.ended.wait(2 * WORK_SECONDS)

    # On the thread that watches.

    def _go_on(self, before: Turn) -> None:
        """Go on from memory, on another thread: that of *before* is in a call to the disk which does not return."""
        self._left = [*(turn for turn in self._left if not turn.ended.is_set()), before]
        storage = until_there_are_threads(
            lambda: self._storage.go_on_in_memory("a call to the disk does not return", before.ended.is_set), self._stop
        )
        self.additions += 1
        if meta.next_sequence(storage.meta) > meta.next_sequence(self._storage.meta):
            _answer(before.outcomes)  # the commit is on the disk: only what follows it hangs
        left_over = []
        for job in before.group:
            if job.future.done():
                continue
            if job.mode is _Mode.EXCLUSIVE:
                job.future.set_exception(OutboxError("The disk under the outbox hangs."))
            else:
                left_over.append(job)
        self.records.open(storage)
        self._storage, turn = storage, Turn()
        self.on_memory()
        catch_up = _Job(work=lambda _: self.records.catch_up(storage.connection), mode=_Mode.WRITE, future=Future())

        def start() -> threading.Thread:
            thread = threading.Thread(
                target=self._work, args=(storage, turn, [catch_up, *left_over]), name="outbox", daemon=True
            )
            thread.start()
            return thread

        self._turn, self._thread = turn, until_there_are_threads(start, self._stop)

    # On the outbox's thread.

    def _gather(self) -> list[_Job]:
        """Return the next job and those that came meanwhile; empty when it is time to close."""
        self.loop_watch.idle()
        group: list[_Job] = []
        until = math.inf
        while len(group) < _MOST_IN_A_GROUP:
            try:
                job = self._jobs.get(timeout=max(until - time.monotonic(), 0.0) if group else None)
            except Empty:
                break
            if job is None:
                if group:
                    self._jobs.put(None)
                break
            if not group:
                self.loop_watch.expect_within(_WORK_SECONDS)
            group.append(job)
            until = min(until, time.monotonic() + _SOON_SECONDS) if job.may_wait else -math.inf
        return group

    def _do_jobs(self, storage: Storage, turn: Turn, jobs: list[_Job], *, is_exclusive: bool) -> None:
        before = storage.connection
        try:
            (self._run_each if is_exclusive else self._commit)(storage, turn, jobs)
            if storage.connection is not before:
                self._catch_up(storage, turn)
        except Exception as problem:
            # The thread outlives everything: without it nothing is stored any more, and no caller gets an answer.
            logger.exception("The outbox failed at something unforeseen.")
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(OutboxError(f"The outbox failed: {problem!r}."))

    def _catch_up(self, storage: Storage, turn: Turn) -> None:
        """Look at what another database holds: sinks it had not seen, records that waited in it."""
        job = _Job(work=lambda _: self.records.catch_up(storage.connection), mode=_Mode.WRITE, future=Future())
        self._commit(storage, turn, [job])

    def _run_each(self, storage: Storage, turn: Turn, group: list[_Job]) -> None:
        for job in group:
            turn.enter(storage.patience_seconds if storage.in_memory else _RECOVERY_SECONDS)
            self._watch.wake()
            value, problem = None, None
            try:
                value = job.work(storage)
            except Exception as error:  # noqa: BLE001  # it is the caller's, who gets it from the Future
                problem = error
            turn.pause()
            self._answer([(job, value, problem)])

    def _commit(self, storage: Storage, turn: Turn, group: list[_Job]) -> None:
        """Do *group* in one transaction, again and again while the storage recovers from what stops it."""
        recoveries = locks = 0
        while True:
            try:
                outcomes = self._attempt(storage, turn, group, may_read_added=recoveries == locks == 0)
                break
            except sqlite3.Error as error:
                turn.enter(_RECOVERY_SECONDS)
                if is_lock(error):
                    locks += 1
                    message = "The outbox is locked by another program; waiting for it."
                    self._log.problem("lock", logging.WARNING, message)
                    if locks < _MOST_LOCKS:
                        continue
                recoveries += 1
                has_recovered = recoveries <= _MOST_RECOVERIES and self._has_recovered(storage, error)
                turn.pause()
                if not has_recovered:
                    for job in group:
                        job.future.set_exception(OutboxError(f"The outbox failed: {error}."))
                    return
        if not storage.in_memory and any(job.mode is _Mode.WRITE for job in group):
            self._log.recovered("lock", "The outbox is not locked any more.")
        self._answer(outcomes)

    def _answer(self, outcomes: list[_Outcome]) -> None:
        """Answer the callers; first of all those who send what was added, since others wait for that."""
        _answer([outcome for outcome in outcomes if outcome[0].mode is _Mode.READ_OF_ADDED])
        try:
            if self.records.take_added():
                self.additions += 1
                self.on_added()
        finally:
            _answer([outcome for outcome in outcomes if outcome[0].mode is not _Mode.READ_OF_ADDED])

    def _has_recovered(self, storage: Storage, error: sqlite3.Error) -> bool:
        try:
            storage.recover(error)
        except (OutboxError, sqlite3.Error, OSError):
            logger.exception("The outbox failed.")
            return False
        if storage.in_memory:
            self.on_memory()
        return True

    def _take_reads_of_added(self) -> list[_Job]:
        """Return the reads to do in the transaction at hand, if it has added deliveries."""
        if not self.records.has_added:
            return []
        with self._gate:
            reads, self._reads_of_added = list(self._reads_of_added.values()), {}
        return reads

    def _attempt(self, storage: Storage, turn: Turn, group: list[_Job], *, may_read_added: bool) -> list[_Outcome]:
        """Do *group* and commit it; memory has no limits, since nothing hangs there."""
        connection = storage.connection
        writes = any(job.mode is _Mode.WRITE for job in group)
        factor = math.inf if storage.in_memory else 1.0
        turn.outcomes = []
        turn.enter(COMMIT_SECONDS * factor)
        self._watch.wake()
        if not (writes and _begin_at_once(connection)):
            turn.enter((BUSY_SECONDS + COMMIT_SECONDS) * factor)
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            outcomes = []
            for job in group:
                turn.enter(WORK_SECONDS * factor)
                outcomes.append((job, *_do(storage, job)))
            for job in self._take_reads_of_added() if may_read_added else ():
                turn.enter(WORK_SECONDS * factor)
                outcomes.append((job, *_do(storage, job)))
            turn.outcomes = outcomes
            turn.enter(COMMIT_SECONDS * factor)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if writes:
            turn.enter(COMMIT_SECONDS * factor)
            storage.mark_read()
            turn.enter(WORK_SECONDS * factor)
            storage.refresh()
        turn.pause()
        return outcomes


def _answer(outcomes: list[_Outcome]) -> None:
    for job, value, problem in outcomes:
        if problem is None:
            job.future.set_result(value)
        else:
            job.future.set_exception(problem)


def _begin_at_once(connection: sqlite3.Connection) -> bool:
    """Begin a transaction that writes, and return whether that was done: another program may have the lock."""
    connection.execute("PRAGMA busy_timeout = 0").close()
    try:
        with suppress_lock():
            connection.execute("BEGIN IMMEDIATE")
    finally:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}").close()
    return connection.in_transaction


def _do(storage: Storage, job: _Job) -> tuple[Any, Exception | None]:
    """Return what *job* returned, or why it was rolled back; raise sqlite3.Error for what the whole group suffers."""
    connection = storage.connection
    connection.execute("SAVEPOINT job")
    try:
        value = job.work(storage)
    except sqlite3.Error as problem:
        if not isinstance(problem, sqlite3.IntegrityError):
            raise
        return None, _undo(connection, OutboxError(f"The outbox refuses that: {problem}."))
    except Exception as problem:  # noqa: BLE001  # it is the caller's, who gets it from the Future
        return None, _undo(connection, problem)
    connection.execute("RELEASE job")
    return value, None


def _undo(connection: sqlite3.Connection, problem: Exception) -> Exception:
    connection.execute("ROLLBACK TO job")
    connection.execute("RELEASE job")
    return problem
