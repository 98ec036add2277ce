"""The stream that an outbox goes on with: its own where the file is surely the newest of it, else a new one.

That is asked at the start, and on the way back from memory to a file that memory could not read; see `newest`. With it
goes since when the decisions in the database count: a stream that may have lost some counts as made anew, and one that
was made while the clock was ahead counts as made when it was.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from pathlib import Path

from bridge.clock import format_time, parse_time
from bridge.outbox import database, meta
from bridge.outbox.database import transaction
from bridge.outbox.locks import read_note, write_note
from bridge.outbox.newest import StreamCounter, doubt_of, runtime_directory, stop_note

logger = logging.getLogger("bridge.outbox.storage")  # the name that logs are filtered by, for all of its parts


class Stream:
    """The stream of the outbox in *directory*; how far it came is kept in *runtime* too (see `newest`)."""

    def __init__(
        self,
        directory: Path,
        *,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        runtime: Path | None,
    ) -> None:
        self._directory = directory
        self.counter = StreamCounter(runtime or runtime_directory())
        self.on_disk: str | None = None
        """In memory: the stream of the file, where memory began another because the file may not be the newest."""
        self.is_new = False
        """Whether the database had none when it was last begun."""
        self._now = now
        self._monotonic = monotonic
        self._known_since = monotonic()
        """When the database was made, or opened by this process if it is older; in monotonic seconds."""

    def begin(self, connection: sqlite3.Connection) -> None:
        """Give a new outbox its stream; one that has a stream keeps it."""
        self.is_new = meta.begin_stream(connection, self._now())

    def start(self, connection: sqlite3.Connection, file_id: str | None) -> None:
        """Go on with the stream that is there at the start, in the file *file_id* if known, or with a new one."""
        if self.is_new:
            write_note(self._directory, "{}")
        else:
            self.go_on_in(connection, file_id)

    def go_on_in(self, connection: sqlite3.Connection, file_id: str | None = None) -> None:
        """Begin a new stream in *connection* when it is not sure to be the newest of its own.

        What a start finds in memory is less sure: no note of a stop can be taken back there.
        """
        known = meta.read_meta(connection)
        is_memory = database.is_in_memory(connection)
        note = read_note(self._directory)
        counts = note if not (is_memory and note) else None
        doubt = doubt_of(known, self.counter, self._now(), counts, file_id=file_id)
        if not note:
            write_note(self._directory, "{}")  # from now on it counts that there is no note of a stop
        if doubt is None:
            return
        with nullcontext() if connection.in_transaction else transaction(connection):
            meta.change_stream(connection)
            if doubt.lacks_decisions:
                self.forget_decisions(connection)
            elif doubt.may_lack_decisions:
                meta.await_portal(connection)
        if is_memory:
            self.on_disk = known["stream_id"]
        logger.warning(
            "The outbox may not be the newest that this machine had: it was restored, or the agent ended while it "
            "worked from memory or was cut off. Its records go on in a new stream, so that no sequence comes twice.",
            extra={"why": doubt.why, "before": known["stream_id"], "stream_id": meta.get(connection, "stream_id")},
        )

    def note_stop(self, connection: sqlite3.Connection, file_id: str | None) -> None:
        """Note that the agent ends in order; without that note the next start may begin a new stream."""
        with suppress(sqlite3.Error):
            write_note(self._directory, stop_note(meta.read_meta(connection), self._now(), file_id))

    def forget_decisions(self, connection: sqlite3.Connection) -> None:
        """Have the database count as made now: some of its decisions are gone, and must not come again."""
        self._known_since = self._monotonic()
        meta.forget_decisions(connection, self._now())

    def is_creation_to_correct(self, known: Mapping[str, str]) -> bool:
        """Return whether `correct_created_at` has something to do in a file that remembers *known*."""
        if self._is_made_in_future(known):
            return self._now() < meta.created_at(known)
        return bool(known.get(meta.CREATED_AT_CORRECTED))

    def _is_made_in_future(self, known: Mapping[str, str]) -> bool:
        return self._now() < parse_time(known["created_at"])

    def correct_created_at(self, connection: sqlite3.Connection, known: Mapping[str, str]) -> None:
        """Have a database that was made while the clock was ahead count as made when it was, inside a transaction.

        Only until the clock reaches that time: it may as well be behind now, and what was decided before the database
        was made must not count for good.
        """
        if not self.is_creation_to_correct(known):
            return
        if not self._is_made_in_future(known):
            logger.info("The clock has reached the time when the outbox was made, which counts again.")
            meta.put(connection, meta.CREATED_AT_CORRECTED, "")
            return
        made_at = self._now() - timedelta(seconds=self._monotonic() - self._known_since)
        logger.warning(
            "The outbox was made at a time that the clock has not reached: it was ahead then, or is behind now. Until "
            "it reaches that time the outbox counts as made at %s, and decisions from then on count.",
            format_time(made_at),
            extra={"before": known["created_at"]},
        )
        meta.put(connection, meta.CREATED_AT_CORRECTED, format_time(made_at))
