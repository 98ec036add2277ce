"""The requests of commands to an agent, their answers, and the handlers.

    page = client.ask(Events(limit=20))

A command asks a running agent over the control socket (`bridge.agent.control.ControlClient`). Without an agent, it asks
`Requests` over an `Outbox` that it opened itself, or over a `StoredOutbox` that only reads. All three take the same
requests and return the same answers.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from bridge.clock import parse_time
from bridge.errors import OutboxError, OutboxReadOnly
from bridge.events.event import Document, VmIdentity
from bridge.events.record import TransitionRecord, decode_record
from bridge.health.readiness import Readiness
from bridge.outbox import approvals, deliveries
from bridge.outbox.database import file_bytes, generations, read_file, read_newest, read_records
from bridge.outbox.deliveries import LastError, OutboxTotals, Snapshot
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import Delivery, DeliveryState, PendingApproval, StoredDecision
from bridge.outbox.state import State

A = TypeVar("A")

SAVE_SECONDS = 0.8
"""The longest wait for a save in one answer."""
HISTORY_SECONDS = 5.0
PAGE_BYTES = 512 * 1024
_FIRST, _LAST = -(2**62), 2**62
"""Imported records have negative sequences."""


class Request(msgspec.Struct, Generic[A], frozen=True, kw_only=True, tag_field="request"):
    """One request; A is the class of the answer."""


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """An agent answered."""


class Ping(Request[Pong], frozen=True, kw_only=True, tag="ping"):
    """Find out whether an agent runs."""


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `status` shows, from one moment."""

    readiness: Readiness | None
    """None without an agent."""
    stream_id: str
    vm: VmIdentity | None
    document: Document | None
    last_good_at: str | None
    newest_record_at: float | None
    totals: OutboxTotals
    last_errors: dict[str, LastError]
    last_transitions: dict[str, TransitionRecord]
    decisions: tuple[StoredDecision, ...]
    approvals: tuple[PendingApproval, ...]
    ages_now: float | None
    """The time by which records age; None without an agent."""
    file: str | None
    """The file of the current generation."""
    older_files: tuple[str, ...]
    used_bytes: int


class Status(Request[StatusAnswer], frozen=True, kw_only=True, tag="status"):
    """Return the state of the agent and of its outbox."""


class EventsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Records, the newest first."""

    records: tuple[TransitionRecord, ...]
    next_before: int | None
    """Ask for the next page with this as `before`; None: this is the last page."""


class Events(Request[EventsPage], frozen=True, kw_only=True, tag="events"):
    """Return the newest records, history included, with *after* < sequence < *before*."""

    after: int | None = None
    before: int | None = None
    limit: int = 1_000
    since: float | None = None
    """Unix seconds: only records that were observed then or later."""
    event_id: str | None = None
    """In any case of letters."""
    event_types: tuple[str, ...] = ()

    def matches(self, record: TransitionRecord) -> bool:
        """Return whether the record passes the filters."""
        event_id, event_type = (record.event.event_id, record.event.event_type) if record.event else (None, None)
        return (
            (self.since is None or parse_time(record.observed_at).timestamp() >= self.since)
            and (self.event_id is None or (event_id or "").casefold() == self.event_id.casefold())
            and (not self.event_types or event_type in self.event_types)
        )


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One pending or parked record of one sink."""

    sink: str
    sequence: int
    state: DeliveryState
    attempts: int
    error: str | None
    changed_at: float
    """Unix seconds."""
    record: TransitionRecord


class OutboxPage(msgspec.Struct, frozen=True, kw_only=True):
    """Rows by sink and sequence."""

    rows: tuple[OutboxRow, ...]
    next_after: tuple[str, int] | None
    """Ask for the next page with this as `after`; None: this is the last page."""


class OutboxList(Request[OutboxPage], frozen=True, kw_only=True, tag="outbox_list"):
    """Return undelivered records. A sink of None means every sink."""

    sink: str | None = None
    states: tuple[DeliveryState, ...] = (DeliveryState.PENDING, DeliveryState.PARKED)
    record_id: str | None = None
    after: tuple[str, int] | None = None
    limit: int = 1_000


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a change."""

    count: int
    """The number of changed records."""
    saved: bool
    """False: the change is made, but not saved yet; ask with `Saved`."""


class OutboxRetry(Request[Changed], frozen=True, kw_only=True, tag="outbox_retry"):
    """Make parked records pending again and end the pause of a sink. A sink of None means every sink."""

    sink: str | None = None
    record_id: str | None = None


class OutboxDiscard(Request[Changed], frozen=True, kw_only=True, tag="outbox_discard"):
    """Discard the records of a sink, or one of them."""

    sink: str
    states: tuple[DeliveryState, ...] = (DeliveryState.PENDING, DeliveryState.PARKED)
    record_id: str | None = None


class OutboxMove(Request[Changed], frozen=True, kw_only=True, tag="outbox_move"):
    """Move the undelivered records of the sink *old* to the sink *new*."""

    old: str
    new: str


class OutboxImport(Request[Changed], frozen=True, kw_only=True, tag="outbox_import"):
    """Add the pending records and holds of another outbox file."""

    path: str
    """Absolute."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `Decide`."""

    other_holds: tuple[StoredDecision, ...]
    """Holds that the request did not name. If there are any, nothing was stored."""
    saved: bool


class Decide(Request[Decided], frozen=True, kw_only=True, tag="decide"):
    """Store a person's decision, which ends the holds *overruled* (arrivals)."""

    decision: StoredDecision
    overruled: tuple[int, ...] = ()


class DecisionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a decision; None if it is unknown."""

    decision: StoredDecision | None


class Decision(Request[DecisionAnswer], frozen=True, kw_only=True, tag="decision"):
    """Return the progress of a decision."""

    source: str
    approver: str
    decision_id: str


class SavedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether everything is saved."""

    saved: bool
    reason: str | None
    """Why the file is behind; None if it is not."""


class Saved(Request[SavedAnswer], frozen=True, kw_only=True, tag="saved"):
    """Save, and return whether every earlier change is saved."""


AnyRequest = (
    Ping
    | Status
    | Events
    | OutboxList
    | OutboxRetry
    | OutboxDiscard
    | OutboxMove
    | OutboxImport
    | Decide
    | Decision
    | Saved
)


class Asked(Protocol):
    """A running agent, an opened outbox, or a stored one."""

    def ask(self, request: Request[A]) -> A:
        """Return the answer to *request*; raise BridgeError."""


def answer_type(request: Request[A]) -> type[A]:
    """Return the class of the answer to *request*."""
    (base,) = type(request).__orig_bases__  # type: ignore[attr-defined]
    answer: type[A] = base.__args__[0]
    return answer


# Handlers.


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
        return _status(
            outbox.read(deliveries.snapshot),
            directory=outbox.directory,
            file=outbox.saver.file,
            used_bytes=outbox.saver.used_bytes,
            readiness=readiness,
            ages_now=None if readiness is None else outbox.totals()[1],
        )

    def _events(self, request: Events) -> EventsPage:
        return _events(request, self._outbox.read(_records), self._outbox.saver.file)

    def _retry(self, request: OutboxRetry) -> Changed:
        self._require_sink(request.sink)
        count = self._outbox.retry(request.sink, record_id=request.record_id)
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
            answer = _status(deliveries.snapshot(self._state), directory=self._directory, file=self._file)
        elif isinstance(request, Events):
            answer = _events(request, {}, self._file)
        elif isinstance(request, OutboxList):
            answer = _list(self._state, request)
        else:
            raise OutboxReadOnly("Without an agent, this request needs an opened outbox.")
        return answer  # type: ignore[no-any-return]


def _status(
    snapshot: Snapshot,
    *,
    directory: Path,
    file: Path | None,
    used_bytes: int | None = None,
    readiness: Readiness | None = None,
    ages_now: float | None = None,
) -> StatusAnswer:
    others: tuple[Path, ...] = ()
    with suppress(OSError):
        others = tuple(path for path in generations(directory).values() if path != file)
    return StatusAnswer(
        readiness=readiness,
        stream_id=snapshot.stream_id,
        vm=snapshot.vm,
        document=snapshot.document,
        last_good_at=snapshot.last_good_at,
        newest_record_at=snapshot.newest_record_at,
        totals=snapshot.totals,
        last_errors=snapshot.last_errors,
        last_transitions=snapshot.last_transitions,
        decisions=snapshot.approvals.decisions,
        approvals=tuple(snapshot.approvals.approvals.values()),
        ages_now=ages_now,
        file=None if file is None else file.name,
        older_files=tuple(path.name for path in others),
        used_bytes=sum(map(file_bytes, (*others, *filter(None, [file])))) if used_bytes is None else used_bytes,
    )


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
    for row in deliveries.needed_records(state, request.sink, request.states):
        if request.after is not None and (row.sink, row.sequence) <= request.after:
            continue
        record = state.records.rows[row.sequence]
        if request.record_id not in (None, record.id):
            continue
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
