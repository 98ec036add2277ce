"""The handlers of requests, on an opened outbox or on the stored outbox.

A handler applies one function of `bridge.outbox` and returns at once. Only `Events` and `OutboxImport` read a file.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bridge.agent.requests import (
    Changed,
    Decide,
    Decided,
    Decision,
    DecisionAnswer,
    Events,
    EventsPage,
    LastError,
    OutboxDiscard,
    OutboxImport,
    OutboxList,
    OutboxMove,
    OutboxPage,
    OutboxRetry,
    OutboxRow,
    Ping,
    Pong,
    Request,
    Saved,
    SavedAnswer,
    Status,
    StatusAnswer,
)
from bridge.errors import OutboxError, OutboxReadOnly
from bridge.events.record import TransitionRecord, decode_record
from bridge.health.readiness import Readiness
from bridge.outbox import approvals, deliveries
from bridge.outbox.database import file_bytes, older_generations, read_file, read_newest, read_records
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import Delivery
from bridge.outbox.state import State, stored_state

A = TypeVar("A")

SAVE_SECONDS = 0.8
"""The longest wait for a save in one answer."""
HISTORY_SECONDS = 5.0
PAGE_BYTES = 512 * 1024
_FIRST, _LAST = -(2**62), 2**62
"""Imported records have negative sequences."""


class Requests:
    """Answers requests from an opened *outbox*.

    *readiness* returns the readiness of the running agent. *on_retry* gets the sink (None: every sink) whose pause
    ends. *on_decision* is called after a decision was stored.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        readiness: Callable[[], Readiness] | None = None,
        on_retry: Callable[[str | None], object] = lambda _sink: None,
        on_decision: Callable[[], object] = lambda: None,
    ) -> None:
        self._outbox = outbox
        self._readiness, self._on_retry, self._on_decision = readiness, on_retry, on_decision
        self._handlers: dict[type[Any], Callable[[Any], msgspec.Struct]] = {
            Ping: lambda _request: Pong(),
            Status: self._status,
            Events: self._events,
            OutboxList: lambda request: outbox.read(_list, request),
            OutboxRetry: self._retry,
            OutboxDiscard: self._discard,
            OutboxMove: self._move,
            OutboxImport: self._import,
            Decide: self._decide,
            Decision: lambda request: outbox.read(_progress, request),
            Saved: lambda _request: SavedAnswer(saved=outbox.wait_saved(SAVE_SECONDS), reason=self._behind_reason),
        }

    def ask(self, request: Request[A]) -> A:
        """Return the answer to *request*; raise BridgeError."""
        if not isinstance(request, Ping) and not self._outbox.wait_loaded(SAVE_SECONDS):
            raise OutboxError("The agent is still loading its state. Try again in a few seconds.")
        answer: Any = self._handlers[type(request)](request)
        return answer  # type: ignore[no-any-return]

    @property
    def _behind_reason(self) -> str | None:
        return self._outbox.saver.behind_reason

    def _status(self, _request: Status) -> StatusAnswer:
        outbox = self._outbox
        readiness = None if self._readiness is None else self._readiness()
        file = outbox.saver.file
        return outbox.read(
            _status,
            file=file,
            older_files=_older_files(outbox.directory, file),
            used_bytes=outbox.saver.used_bytes,
            readiness=readiness,
            active_event_ids=outbox.active_event_ids,
        )

    def _events(self, request: Events) -> EventsPage:
        return _events(request, self._outbox.read(_records), self._outbox.saver.file)

    def _retry(self, request: OutboxRetry) -> Changed:
        self._require_sink(request.sink)
        count = self._outbox.change(deliveries.retry, request.sink, record_id=request.record_id, now=time.time())
        self._on_retry(request.sink)
        return self._changed(count)

    def _discard(self, request: OutboxDiscard) -> Changed:
        self._require_sink(request.sink)
        count = self._outbox.change(
            deliveries.discard, request.sink, states=request.states, record_id=request.record_id, now=time.time()
        )
        return self._changed(count)

    def _move(self, request: OutboxMove) -> Changed:
        self._require_sink(request.old)
        self._require_sink(request.new)
        if request.old == request.new:
            raise OutboxError("The two sinks are the same sink.")
        return self._changed(self._outbox.change(deliveries.move, request.old, request.new, now=time.time()))

    def _import(self, request: OutboxImport) -> Changed:
        try:
            loaded = read_file(Path(request.path))
        except (OSError, sqlite3.Error) as error:
            raise OutboxError(f"The file {request.path} cannot be read: {error}.") from error
        if loaded is None:
            raise OutboxError(f"The file {request.path} is not a complete outbox of this version.")
        file = self._outbox.saver.file
        stored = () if file is None else _in_time(read_records(file, after=_FIRST, before=_LAST))
        own = (decode_record(body) for _, body in stored)
        known = {(record.stream_id, record.sequence) for record in own}
        return self._changed(self._outbox.change(deliveries.import_rows, loaded.rows, known))

    def _decide(self, request: Decide) -> Decided:
        others = self._outbox.change(approvals.keep_overruling, request.decision, request.overruled)
        if others:
            return Decided(other_holds=others, saved=True)
        self._on_decision()
        return Decided(other_holds=(), saved=self._outbox.wait_saved(SAVE_SECONDS))

    def _changed(self, count: int) -> Changed:
        return Changed(count=count, saved=self._outbox.wait_saved(SAVE_SECONDS))

    def _require_sink(self, sink: str | None) -> None:
        known = self._outbox.read(lambda state: list(state.sinks.rows))
        if sink is not None and sink not in known:
            raise OutboxError(f"Unknown sink {sink!r}. Known sinks: {', '.join(known) or 'none'}.")


class StoredOutbox:
    """Answers requests from the newest complete file in *directory*, and changes nothing.

    Raises OutboxError if there is no such file, or if it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            loaded = read_newest(directory)
        except (OSError, sqlite3.Error) as error:
            raise OutboxError(f"The outbox in {directory} cannot be read: {error}.") from error
        if loaded.file is None:
            raise OutboxError(f"The directory {directory} contains no outbox. Has an agent run with this directory?")
        self._file = loaded.file
        self._state = State()
        self._state.load(loaded.rows)

    def ask(self, request: Request[A]) -> A:
        """Return the answer to *request*, which must not change anything."""
        answer: Any
        if isinstance(request, Status):
            older = _older_files(self._directory, self._file)
            used_bytes = sum(map(file_bytes, (self._file, *older)))
            answer = _status(self._state, file=self._file, older_files=older, used_bytes=used_bytes)
        elif isinstance(request, Events):
            answer = _events(request, {}, self._file)
        elif isinstance(request, OutboxList):
            answer = _list(self._state, request)
        else:
            raise OutboxReadOnly("Without an agent, this request needs an opened outbox.")
        return answer  # type: ignore[no-any-return]


def _older_files(directory: Path, file: Path | None) -> list[Path]:
    with suppress(OSError):
        return older_generations(directory, file)
    return []


def _status(
    state: State,
    *,
    file: Path | None,
    older_files: Iterable[Path],
    used_bytes: int,
    readiness: Readiness | None = None,
    active_event_ids: tuple[str, ...] | None = None,
) -> StatusAnswer:
    stored, decided = stored_state(state), approvals.read_state(state)
    active = [event for event in state.events.rows.values() if event.ended_at is None]
    last = {event.key: state.records.rows.get(event.last_state_sequence or 0) for event in active}
    return StatusAnswer(
        stream_id=decided.stream_id,
        vm=stored.vm,
        document=stored.document,
        last_good_at=state.get("last_good_at"),
        newest_record_at=max((row.observed_at for row in state.records.rows.values()), default=None),
        totals=deliveries.totals(state),
        last_errors={name: error for name in state.queues if (error := _last_error(state, name)) is not None},
        last_transitions={key: row.record for key, row in last.items() if row is not None},
        decisions=decided.decisions,
        approvals=tuple(decided.approvals.values()),
        readiness=readiness,
        active_event_ids=active_event_ids,
        file=None if file is None else file.name,
        older_files=tuple(path.name for path in older_files),
        used_bytes=used_bytes,
    )


def _last_error(state: State, sink: str) -> LastError | None:
    rows = [row for row in deliveries.needed_records(state, sink) if row.error is not None]
    newest = max(rows, key=lambda row: row.changed_at, default=None)
    return None if newest is None else LastError(message=newest.error or "", at=newest.changed_at)


def _records(state: State) -> dict[int, bytes]:
    """Return the records in memory by sequence: some may not be in the file yet."""
    return {row.sequence: row.body for row in state.records.rows.values()}


def _events(request: Events, in_memory: Mapping[int, bytes], file: Path | None) -> EventsPage:
    after = _FIRST if request.after is None else request.after
    before = _LAST if request.before is None else request.before
    found: list[TransitionRecord] = []
    last = size = 0
    for sequence, body in _newest_first(in_memory, file, after=after, before=before):
        if len(found) >= max(request.limit, 1) or size > PAGE_BYTES:
            return EventsPage(records=tuple(found), next_before=last)
        record = decode_record(body)
        if request.matches(record):
            found.append(record)
            last, size = sequence, size + len(body)
    return EventsPage(records=tuple(found), next_before=None)


def _newest_first(
    in_memory: Mapping[int, bytes], file: Path | None, *, after: int, before: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the records in memory and in the file, each once."""
    left = sorted(item for item in in_memory.items() if after < item[0] < before)
    stored = () if file is None else _in_time(read_records(file, after=after, before=before))
    for sequence, body in stored:
        while left and left[-1][0] >= sequence:
            newer = left.pop()
            if newer[0] > sequence:
                yield newer
        yield sequence, body
    yield from reversed(left)


def _in_time(records: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield *records*; raise OutboxError if the disk fails, or after 5 s."""
    deadline = time.monotonic() + HISTORY_SECONDS
    try:
        for record in records:
            yield record
            if time.monotonic() > deadline:
                raise OutboxError(f"The history was not read within {HISTORY_SECONDS:g} s. Ask for fewer records.")
    except (OSError, sqlite3.Error) as error:
        raise OutboxError(f"The history cannot be read: {error}.") from error


def _list(state: State, request: OutboxList) -> OutboxPage:
    rows: list[OutboxRow] = []
    size = 0
    for row in deliveries.needed_records(state, request.sink, request.states, record_id=request.record_id):
        if request.after is not None and (row.sink, row.sequence) <= request.after:
            continue
        record = state.records.rows[row.sequence]
        if len(rows) >= max(request.limit, 1) or size > PAGE_BYTES:
            return OutboxPage(rows=tuple(rows), next_after=(rows[-1].sink, rows[-1].sequence))
        rows.append(_outbox_row(row, record.record))
        size += len(record.body)
    return OutboxPage(rows=tuple(rows), next_after=None)


def _outbox_row(row: Delivery, record: TransitionRecord) -> OutboxRow:
    return OutboxRow(
        sink=row.sink,
        sequence=row.sequence,
        state=row.state,
        attempts=row.attempts,
        error=row.error,
        changed_at=row.changed_at,
        record=record,
    )


def _progress(state: State, request: Decision) -> DecisionAnswer:
    found = approvals.find_decision(state, request.source, request.approver, request.decision_id)
    return DecisionAnswer(decision=found)
