"""One thread that owns the outbox: it commits together what has gathered while the last commit was on its way.

A lock around the connection was measured to starve the poll: with 5 ms of fsync its p99 was 250 ms, with one thread
and group commit 18 ms. So nobody else touches the connection; work comes in as a function and goes out as a Future.

A group that fails because of the disk is done again after the store has answered for it, so a caller never sees a
disk that is full or damaged. A function that raises something of its own is rolled back alone.

Another program's lock is waited for, since a command of ours is short; one that lasts for two busy timeouts (10 s)
counts as a disk that refuses, or whoever holds it would stop the poll and every sink.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from enum import Enum
from itertools import groupby
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from bridge.errors import OutboxError
from bridge.logs import ThrottledLog
from bridge.outbox.database import is_lock
from bridge.outbox.storage import Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Storage], T]
_MOST_IN_A_GROUP = 256
_LOOK_SECONDS = 0.05
#: A mend that does not help, again and again, would fill the disk with files set aside.
_MOST_ANSWERS = 3
#: Each is a busy timeout of 5 s.
_MOST_LOCKS = 2


def result_or_stop(future: Future[T], stop: Callable[[], bool]) -> T | None:
    """Return the result of *future*, or null once *stop* returns True: the outbox may wait 10 s for a lock."""
    while not wait_for([future], _LOOK_SECONDS).done:
        if stop():
            return None
    return future.result()


class _Mode(Enum):
    READ = "read"
    WRITE = "write"
    ALONE = "alone"


class _Job(msgspec.Struct, kw_only=True):
    work: Callable[[Storage], Any]
    mode: _Mode
    future: Future[Any]


class DatabaseThread:
    """Runs functions over a store, one after the other, on a thread of its own."""

    def __init__(self, open_store: Callable[[], Storage]) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._opened: Future[Storage] = Future()
        self._open_store = open_store
        self._gate = threading.Lock()
        self._is_closed = False
        self._report = ThrottledLog(logger)
        self._thread.start()
        self._opened.result()

    def write(self, work: Work[T]) -> Future[T]:
        """Run *work* in a transaction; the Future is done when it is committed."""
        return self._submit(work, _Mode.WRITE)

    def read(self, work: Work[T]) -> Future[T]:
        """Run *work*, which only reads."""
        return self._submit(work, _Mode.READ)

    def alone(self, work: Work[T]) -> Future[T]:
        """Run *work* between two transactions: it exchanges the database itself."""
        return self._submit(work, _Mode.ALONE)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Finish what was handed in, then close the store; return whether that was done in time."""
        with self._gate:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _submit(self, work: Work[T], mode: _Mode) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # what was handed in is done: it cannot be cancelled
        with self._gate:
            if self._is_closed:
                raise OutboxError("The outbox is closed.")
            self._jobs.put(_Job(work=work, mode=mode, future=future))
        return future

    def _run(self) -> None:
        try:
            store = self._open_store()
        except BaseException as error:  # noqa: BLE001  # handed to the opener, who waits for it
            self._opened.set_exception(error)
            return
        self._opened.set_result(store)
        try:
            while group := self._gather():
                for is_alone, jobs in groupby(group, key=lambda job: job.mode is _Mode.ALONE):
                    self._do_jobs(store, list(jobs), is_alone=is_alone)
        finally:
            store.close()

    def _do_jobs(self, store: Storage, jobs: list[_Job], *, is_alone: bool) -> None:
        try:
            (self._run_alone if is_alone else self._commit)(store, jobs)
        except Exception as problem:
            # The thread outlives everything: without it nothing is stored any more, and nobody is answered.
            logger.exception("The outbox failed at something unforeseen.")
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(OutboxError(f"The outbox failed: {problem!r}."))

    def _gather(self) -> list[_Job]:
        """Return the next job and those that came meanwhile; empty when it is time to close."""
        first = self._jobs.get()
        group: list[_Job] = []
        while first is not None:
            group.append(first)
            if len(group) == _MOST_IN_A_GROUP or self._jobs.empty():
                return group
            first = self._jobs.get()
        if group:
            self._jobs.put(None)
        return group

    def _run_alone(self, store: Storage, group: list[_Job]) -> None:
        for job in group:
            try:
                job.future.set_result(job.work(store))
            except Exception as problem:  # noqa: BLE001  # it is the caller's, who gets it from the Future
                job.future.set_exception(problem)

    def _commit(self, store: Storage, group: list[_Job]) -> None:
        """Do *group* in one transaction, again and again while the store finds an answer to what stops it."""
        answers = locks = 0
        while True:
            try:
                results = self._attempt(store, group)
                break
            except sqlite3.Error as error:
                if is_lock(error):
                    locks += 1
                    message = "The outbox is locked by another program; waiting for it."
                    self._report.problem("lock", logging.WARNING, message)
                    if locks < _MOST_LOCKS:
                        continue
                answers += 1
                if answers > _MOST_ANSWERS or not self._answered(store, error):
                    for job in group:
                        job.future.set_exception(OutboxError(f"The outbox failed: {error}."))
                    return
        if not store.in_memory and any(job.mode is _Mode.WRITE for job in group):
            self._report.recovered("lock", "The outbox is not locked any more.")
        for job, (value, problem) in zip(group, results, strict=True):
            if problem is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(problem)

    def _answered(self, store: Storage, error: sqlite3.Error) -> bool:
        try:
            store.recover(error)
        except (OutboxError, sqlite3.Error, OSError):
            logger.exception("The outbox failed.")
            return False
        return True

    def _attempt(self, store: Storage, group: list[_Job]) -> list[tuple[Any, Exception | None]]:
        connection = store.connection
        writes = any(job.mode is _Mode.WRITE for job in group)
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            results = [self._do(store, job) for job in group]
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if writes:
            store.refresh()
        return results

    def _do(self, store: Storage, job: _Job) -> tuple[Any, Exception | None]:
        connection = store.connection
        connection.execute("SAVEPOINT job")
        try:
            value = job.work(store)
        except sqlite3.Error as problem:
            if not isinstance(problem, sqlite3.IntegrityError):
                raise
            return None, self._undo(connection, OutboxError(f"The outbox refuses that: {problem}."))
        except Exception as problem:  # noqa: BLE001  # it is the caller's, who gets it from the Future
            return None, self._undo(connection, problem)
        connection.execute("RELEASE job")
        return value, None

    def _undo(self, connection: sqlite3.Connection, problem: Exception) -> Exception:
        connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")
        return problem
