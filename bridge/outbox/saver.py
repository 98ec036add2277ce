"""Saves the agent's state to the outbox file. Only the saver thread writes this file.

Each save writes, in one transaction, all rows that have changed since the last save. If a save fails, the saver retries
later. If the disk hangs, only the saver thread blocks, and `behind_reason` reports the problem after 2 s.

If another program changes the file, or if SQLite reports damage, the saver writes the complete state to a new file.

When the disk is full or the size limit is reached, the saver deletes older outbox files first, and then the oldest
history. If the files still exceed the limit, it evicts undelivered records (`bridge.outbox.retention.make_room`).

The saver cannot detect every change by another program. If another program truncates or overwrites the file or its WAL
during a save, the saver mistakes the change for its own write, unless SQLite reports damage.
"""

from __future__ import annotations

import logging
import math
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bridge.outbox import database
from bridge.outbox.database import Database, Fingerprint, Loaded
from bridge.outbox.state import Changes, State

logger = logging.getLogger(__name__)

BEHIND_SECONDS = 2.0
_MARKS_WAIT_SECONDS = 0.2
_CHECK_SECONDS = 5.0
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.5, 30.0
_STOP_RETRY_SECONDS = 0.2
_UNREADABLE_SECONDS = 30.0
_MOST_UNSAVED = 10_000  # limits the memory if the disk fails for weeks
_CLEAN_SECONDS = 600.0
_KEPT_GENERATIONS = 2
_FULL_SHARE = 0.95
#: On a small volume, the outbox can use this share of the space. The WAL and a new file need the rest.
_VOLUME_SHARE = 1 / 3
_CHANGED = "another program changed, moved, or deleted it"
_DAMAGED = "it is damaged"


class Saver:
    """Saves *state* in *directory*. The *lock* protects the state.

    The saver calls *make_room* to evict records, and *claim* before it creates a file. It holds the lock while it calls
    *on_loaded*, but not during any other callback.
    """

    def __init__(
        self,
        directory: Path,
        state: State,
        lock: threading.Lock,
        *,
        max_bytes: int,
        keep_history_seconds: float,
        on_loaded: Callable[[Loaded], None],
        on_saved: Callable[[], None],
        make_room: Callable[[int], None],
        claim: Callable[[], object],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._state, self._lock = directory, state, lock
        self._max_bytes, self._keep_history_seconds = max_bytes, keep_history_seconds
        self._on_loaded, self._on_saved, self._make_room, self._claim = on_loaded, on_saved, make_room, claim
        self._now = now
        self._turn = threading.Condition()
        self._save_at = math.inf
        self._requested = self._confirmed = 0
        self._is_stopping = False
        self._unsaved = Changes()
        self._database: Database | None = None
        self._print: Fingerprint | None = None
        self._behind_since: float | None = None
        """When the first attempt at the current save began, or None while no save runs."""
        self._failure: str | None = None
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._cleaned_at = -math.inf
        self._older_bytes = 0
        self._limit: float = max_bytes
        self.loaded = threading.Event()
        self.saved_through = 0  # the sequence of the newest record in the file
        self.file: Path | None = None
        self.used_bytes = 0
        """The size of all files. Near the limit, only the used pages of the current file count."""
        self.file_changes = 0  # how many files were replaced because of failures
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    @property
    def behind_seconds(self) -> float:
        """Return how long the disk has been failing or hanging, or 0 if the file is up to date."""
        since = self._behind_since
        seconds = 0.0 if since is None else time.monotonic() - since
        return seconds if self._failure is not None or seconds > BEHIND_SECONDS else 0.0

    @property
    def behind_reason(self) -> str | None:
        """Return why the file is behind, or None if the file is up to date."""
        return self._failure or ("The disk does not respond." if self.behind_seconds else None)

    def wake(self, *, soon: bool) -> None:
        """Start a save immediately, or within 0.2 s if *soon* is False."""
        save_at = time.monotonic() + (0.0 if soon else _MARKS_WAIT_SECONDS)
        with self._turn:
            if save_at < self._save_at:
                self._save_at = save_at
                self._turn.notify_all()

    def wait_saved(self, seconds: float) -> bool:
        """Check the file and save. Return True if earlier changes are saved within *seconds*."""
        with self._turn:
            self._requested += 1
            request = self._requested
            self._turn.notify_all()
            return self._turn.wait_for(lambda: self._confirmed >= request, seconds)

    def close(self, seconds: float) -> bool:
        """Save all changes, and end the thread. Return False if this takes longer than *seconds*."""
        with self._turn:
            self._is_stopping = True
            self._requested += 1
            self._turn.notify_all()
        self._thread.join(max(seconds, 0.0))
        return self._confirmed >= self._requested and not self._thread.is_alive()

    def _run(self) -> None:
        if not self._load():
            return
        while True:
            is_last, request = self._wait()
            if not self._save(request):
                self._pause()
            elif is_last:
                break
        if self._database is not None:
            self._database.close()

    def _wait(self) -> tuple[bool, int]:
        """Wait until a save is due.

        Returns whether the thread must stop, and the number of the newest save request.
        """
        check_at = time.monotonic() + _CHECK_SECONDS
        with self._turn:
            while not self._is_stopping and self._requested == self._confirmed:
                left = min(self._save_at, check_at) - time.monotonic()
                if left <= 0:
                    break
                self._turn.wait(left)
            self._save_at = math.inf
            return self._is_stopping, self._requested

    def _pause(self) -> None:
        with self._turn:
            if self._turn.wait_for(lambda: self._is_stopping, self._retry_seconds):
                self._turn.wait(_STOP_RETRY_SECONDS)
            self._save_at = 0.0
        self._retry_seconds = min(self._retry_seconds * 2, _LONGEST_RETRY_SECONDS)

    def _load(self) -> bool:
        give_up_at = time.monotonic() + _UNREADABLE_SECONDS
        while not self._is_stopping:
            try:
                self._take(database.read_newest(self._directory))
            except Exception as error:  # noqa: BLE001  # rows of a damaged file can contradict each other
                if isinstance(error, (OSError, sqlite3.Error)) and time.monotonic() < give_up_at:
                    with self._turn:
                        self._turn.wait_for(lambda: self._is_stopping, _FIRST_RETRY_SECONDS)
                    continue
                logger.error("The outbox cannot be read. The agent starts without it. %r", error)  # noqa: TRY400
                self._state.reset(_DAMAGED)
                self._take(Loaded(unreadable=(self._directory,)))
            self.loaded.set()
            return True
        return False

    def _take(self, loaded: Loaded) -> None:
        self.file, self._print = loaded.file, loaded.fingerprint
        if loaded.is_damaged:
            self._unsaved.require_new_file(_DAMAGED)
        with self._lock:
            self._state.load(loaded.rows)
            self._on_loaded(loaded)

    def _save(self, request: int) -> bool:
        self._behind_since = self._behind_since or time.monotonic()
        try:
            has_written = self._write()
            self._confirm(request, has_written=has_written)
            self._keep_limits(has_written=has_written)
        except Exception as error:  # noqa: BLE001  # the saver logs every error and continues
            self._failed(error)
            return False
        self._behind_since = None
        return True

    def _write(self) -> bool:
        unsaved = self._unsaved
        if self.file is not None and unsaved.new_file_because is None:
            if self._is_changed():
                unsaved.require_new_file(_CHANGED)
            elif self._database is None:
                self._database = Database(self.file)
                self._accept_own_changes()
        with self._lock:
            unsaved.add(self._state.take_changes())
        has_written = self._database is None or unsaved.new_file_because is not None or any(unsaved.tables.values())
        if self._database is not None and unsaved.new_file_because is None and has_written:
            self._database.save(unsaved)
            self._accept_own_changes()
        through = unsaved.through
        if self._database is None or unsaved.new_file_because is not None:
            through = self._create_file(unsaved.new_file_because)
        if through > self.saved_through:
            self.wake(soon=False)  # plan the save of these records' results, so that they need not wake the thread
        self._unsaved, self.saved_through = Changes(), through
        return has_written

    def _create_file(self, reason: str | None) -> int:
        self._claim()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            everything = self._state.take_everything()
        created = Database.create(self._directory, everything)
        if self._database is not None:
            self._database.close()
        self._database, before, self.file = created, self.file, created.path
        self._print = database.fingerprint(created.path)
        self._cleaned_at = -math.inf
        if reason is not None:
            self.file_changes += 1
            logger.error(
                "The agent wrote its complete state to a new file, because the previous file cannot be used: %s.",
                reason,
                extra={"file": created.path.name, "before": None if before is None else before.name},
            )
        with suppress(OSError):
            for path in database.older_generations(self._directory, created.path)[_KEPT_GENERATIONS:]:
                database.delete_generation(path)
        return everything.through

    def _confirm(self, request: int, *, has_written: bool) -> None:
        was_behind = self._failure is not None
        if was_behind:
            logger.info("The outbox is saved again.", extra={"directory": str(self._directory)})
        self._failure, self._behind_since = None, time.monotonic()
        self._retry_seconds = _FIRST_RETRY_SECONDS
        with self._turn:
            self._confirmed = request
            self._turn.notify_all()
        if has_written or was_behind:
            self._on_saved()

    def _failed(self, error: Exception) -> None:
        if self._failure is None:
            logger.error(
                "The outbox cannot be saved. The agent continues from memory and approves nothing. %s",
                error,
                extra={"directory": str(self._directory)},
            )
        self._failure = f"{error}".rstrip(".") + "."
        if len(self._unsaved.tables.get("records", ())) > _MOST_UNSAVED:
            self._unsaved.require_new_file("too many changes were not saved in time")
        if database.is_damage(error):
            self._unsaved.require_new_file(_DAMAGED)
        if database.is_read_only(error):  # SQLite cannot make this connection writable again
            self._unsaved.require_new_file("it was read-only")
        with suppress(OSError, sqlite3.Error):
            self._accept_own_changes()
            if database.is_full(error) and self._free_space():
                logger.warning("The disk is full. The agent deleted an older file or delivered records early.")

    def _accept_own_changes(self) -> None:
        """Update the file's stored fingerprint after the saver has written to the file.

        If another program has replaced or truncated the file, the next save writes a new file.
        """
        if self._database is None:
            return
        after = database.fingerprint(self._database.path)
        if self._print is not None and not database.follows(self._print, after):
            self._unsaved.require_new_file(_CHANGED)
        self._print = after

    def _keep_limits(self, *, has_written: bool) -> None:
        """Delete old history. If the files are close to their size limit, also free space.

        Each save does only one short step of this work.
        """
        current, now = self._database, time.monotonic()
        is_cleaning = now - self._cleaned_at >= min(_CLEAN_SECONDS, max(self._keep_history_seconds / 10, 1.0))
        if current is None or not (has_written or is_cleaning):
            return
        if is_cleaning:
            if self._delete_history(current, before=self._now() - self._keep_history_seconds) < database.HISTORY_STEP:
                self._cleaned_at = now
            with suppress(OSError):  # the next save detects a missing directory
                older = database.older_generations(self._directory, current.path)
                self._older_bytes = sum(map(database.file_bytes, older))
                volume = shutil.disk_usage(self._directory).total
                self._limit = min(self._max_bytes, volume * _VOLUME_SHARE) * _FULL_SHARE
        used = sum(each[2] for each in self._print or () if each is not None)
        if used + self._older_bytes > self._limit:
            used = current.used_bytes
        self.used_bytes = used + self._older_bytes
        excess = self.used_bytes - int(self._limit)
        if excess > 0:
            if self._free_space():
                self.wake(soon=True)
            else:
                self._make_room(excess)

    def _free_space(self) -> bool:
        """Delete the oldest outbox file except the current one. If there is none, delete history.

        Returns whether this freed any space.
        """
        if self._database is None:
            return False
        older = database.older_generations(self._directory, self._database.path)
        if older:
            database.delete_generation(older[-1])
            self._cleaned_at = -math.inf
            return True
        deleted = self._delete_history(self._database)
        if not self._is_changed():
            self._database.checkpoint()
            self._accept_own_changes()
        return deleted > 0

    def _is_changed(self) -> bool:
        return self.file is None or database.fingerprint(self.file) != self._print

    def _delete_history(self, current: Database, *, before: float = math.inf) -> int:
        if self._is_changed():  # accepting this program's changes would also accept those of the other program
            return 0
        with self._lock:
            self._unsaved.add(self._state.take_changes())
            in_memory = set(self._state.records.rows)
        unsaved = self._unsaved.tables
        in_memory.update(unsaved.get("records", ()), (sequence for sequence, _ in unsaved.get("deliveries", ())))
        deleted = current.delete_history(in_memory, before=before)
        if deleted:
            self._accept_own_changes()
        return deleted
