"""Defines one function for each request that the control socket accepts.

`_REQUESTS`, at the end of this file, lists all requests. A command passes one of these functions to
`bridge.agent.control_socket.ControlClient`, for example ``client.ask(read_events, limit=20)``. The agent calls the
function with its own `Source` and returns the result. If no agent runs, the command opens a `Source` and calls the same
function directly. The type annotations of a function define the JSON format of its arguments and its result.

Each function must return quickly. Only `read_events` and `import_records` read files.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import msgspec

from bridge.clock import parse_time
from bridge.errors import OutboxError
from bridge.events.event import Document, VmIdentity
from bridge.events.record import TransitionRecord, decode_record
from bridge.health.readiness import Readiness
from bridge.outbox import approvals, deliveries
from bridge.outbox.deliveries import OutboxTotals
from bridge.outbox.records import LAST_ENDING
from bridge.outbox.rows import NEEDED, Delivery, DeliveryState, PendingApproval, StoredDecision
from bridge.outbox.state import State

if TYPE_CHECKING:  # a command that asks an agent does not need sqlite3, whose import takes a tenth of its time
    from bridge.outbox.outbox import Outbox

P = ParamSpec("P")
T = TypeVar("T")

SAVE_SECONDS = 0.8
"""The longest time that one request waits for a save."""
HISTORY_SECONDS = 5.0
PAGE_BYTES = 512 * 1024
PAGE_ROWS = 1_000
FIRST, LAST = -(2**62), 2**62
"""The lowest possible sequence is negative, because imported records have negative sequences."""


class Source:
    """The outbox that a request reads or changes.

    In a running agent, *outbox* is the agent's own outbox. If *outbox* is None, the source reads the newest complete
    outbox file in *directory*, and raises OutboxError if it finds none. `retry_records` calls *on_retry* with the
    sink's name, or with None if it retries the records of all sinks.
    """

    def __init__(
        self,
        directory: Path,
        outbox: Outbox | None = None,
        *,
        readiness: Callable[[], Readiness | None] = lambda: None,
        sinks: Callable[[], tuple[str, ...] | None] = lambda: None,
        on_retry: Callable[[str | None], object] = lambda _sink: None,
        on_decision: Callable[[], object] = lambda: None,
        is_approving: Callable[[], bool] = lambda: True,
    ) -> None:
        self.directory = directory
        self.readiness, self.sinks = readiness, sinks
        self.on_retry, self.on_decision, self.is_approving = on_retry, on_decision, is_approving
        self._outbox = outbox
        self._state = State()
        self._file: Path | None = None
        if outbox is None:
            self._load()

    def _load(self) -> None:
        from bridge.outbox.database import read_newest  # noqa: PLC0415

        with _disk_errors(f"The outbox in {self.directory} cannot be read"):
            loaded = read_newest(self.directory)
        if loaded.file is None:
            raise OutboxError(f"The directory {self.directory} contains no outbox. Check whether an agent has used it.")
        self._file = loaded.file
        self._state.load(loaded.rows)

    @property
    def outbox(self) -> Outbox:
        """Return the outbox. Raises OutboxError if this source is read-only."""
        if self._outbox is None:
            raise OutboxError("This request needs a running agent.")
        return self._outbox

    @property
    def file(self) -> Path | None:
        """Return the current outbox file, or None if no file exists yet."""
        return self._file if self._outbox is None else self._outbox.saver.file

    def read(self, work: Callable[Concatenate[State, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of *work*, which can read the state but must not change it."""
        return work(self._state, *args, **kwargs) if self._outbox is None else self._outbox.read(work, *args, **kwargs)

    def answer(self, name: str, arguments: Mapping[str, msgspec.Raw]) -> object:
        """Return the result of the request *name*. Raises BridgeError or MsgspecError."""
        if not self.outbox.wait_loaded(SAVE_SECONDS):
            raise OutboxError("The agent is still loading its state. Try again in a few seconds.")
        function = _REQUESTS.get(name)
        if function is None:
            raise OutboxError(
                f"The agent does not support the request {name}. The versions of the agent and the command differ."
            )
        types = get_type_hints(function)
        decoded = {key: msgspec.json.decode(value, type=types.get(key, Any)) for key, value in arguments.items()}
        return function(self, **decoded)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The response to `read_status`. All values are from the same moment."""

    vm: VmIdentity | None
    document: Document | None
    last_good_at: str | None
    newest_record_at: float | None
    totals: OutboxTotals
    last_errors: dict[str, tuple[str, float]]
    """For each sink, the newest error of a pending or parked record, and the time of the error in Unix seconds."""
    last_transitions: dict[str, TransitionRecord]
    """The newest record that Azure caused for each active event, by event key."""
    last_ending: TransitionRecord | None
    """The newest ending record with a measured impact."""
    decisions: tuple[StoredDecision, ...]
    approvals: tuple[PendingApproval, ...]
    readiness: Readiness | None
    """None if no agent runs."""
    sinks: tuple[str, ...] | None
    """The sinks in the agent's configuration. None if no agent runs."""
    active_event_ids: tuple[str, ...] | None
    """The EventIds of the open events, as in a record. None if no agent runs, or if the open events are unknown."""
    older_files: tuple[str, ...]
    used_bytes: int


def read_status(source: Source) -> Status:
    """Return the state of the agent and of the outbox."""
    from bridge.outbox.database import file_bytes, older_generations  # noqa: PLC0415

    file, readiness = source.file, source.readiness()
    older: list[Path] = []
    with suppress(OSError):
        older = older_generations(source.directory, file)
    if readiness is None:
        used_bytes, active_event_ids = sum(map(file_bytes, (*older, *filter(None, [file])))), None
    else:
        used_bytes, active_event_ids = source.outbox.saver.used_bytes, source.outbox.active_event_ids

    def status(state: State) -> Status:
        decided = approvals.read_state(state)
        active = [event for event in state.events.rows.values() if event.ended_at is None]
        ending = state.get(LAST_ENDING)
        last = {event.key: state.records.rows.get(event.last_state_sequence or 0) for event in active}
        return Status(
            vm=state.vm,
            document=state.document,
            last_good_at=state.get("last_good_at"),
            newest_record_at=max((row.observed_at for row in state.records.rows.values()), default=None),
            totals=deliveries.totals(state),
            last_errors={name: error for name in state.queues if (error := _last_error(state, name)) is not None},
            last_transitions={key: row.record for key, row in last.items() if row is not None},
            last_ending=None if ending is None else decode_record(ending),
            decisions=decided.decisions,
            approvals=tuple(decided.approvals.values()),
            readiness=readiness,
            sinks=source.sinks(),
            active_event_ids=active_event_ids,
            older_files=tuple(path.name for path in older),
            used_bytes=used_bytes,
        )

    return source.read(status)


def _last_error(state: State, sink: str) -> tuple[str, float] | None:
    errors = [(row.error, row.changed_at) for row in deliveries.needed_records(state, sink) if row.error is not None]
    return max(errors, key=itemgetter(1), default=None)


class RecordFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the records that the `events` command lists."""

    since: float | None = None
    """Unix seconds. Earlier records do not match."""
    event_id: str | None = None
    """The comparison ignores case."""
    event_types: tuple[str, ...] = ()

    def matches(self, record: TransitionRecord) -> bool:
        """Return whether the record passes the filter."""
        event_id, event_type = (record.event.event_id, record.event.event_type) if record.event else (None, None)
        return (
            (self.since is None or parse_time(record.observed_at).timestamp() >= self.since)
            and (self.event_id is None or (event_id or "").casefold() == self.event_id.casefold())
            and (not self.event_types or event_type in self.event_types)
        )


EVERY_RECORD = RecordFilter()


class EventsPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of records, newest first."""

    records: tuple[TransitionRecord, ...]
    next_before: int | None
    """The argument *before* for the next page, or None on the last page."""


def read_events(
    source: Source,
    *,
    wanted: RecordFilter = EVERY_RECORD,
    after: int = FIRST,
    before: int = LAST,
    limit: int = PAGE_ROWS,
) -> EventsPage:
    """Return the newest records between *after* and *before*, including history in the file."""
    in_memory = source.read(
        lambda state: {row.sequence: row.body for row in state.records.rows.values() if after < row.sequence < before}
    )
    stored = (row for row in _stored(source.file, after=after, before=before) if row[0] not in in_memory)
    newest_first = heapq.merge(sorted(in_memory.items(), reverse=True), stored, key=itemgetter(0), reverse=True)
    found: list[TransitionRecord] = []
    last = size = 0
    for sequence, body in newest_first:
        if len(found) >= limit or size > PAGE_BYTES:
            return EventsPage(records=tuple(found), next_before=last)
        record = decode_record(body)
        if wanted.matches(record):
            found.append(record)
            last, size = sequence, size + len(body)
    return EventsPage(records=tuple(found), next_before=None)


def _stored(file: Path | None, *, after: int = FIRST, before: int = LAST) -> Iterator[tuple[int, bytes]]:
    from bridge.outbox.database import read_records  # noqa: PLC0415

    if file is None:
        return
    deadline = time.monotonic() + HISTORY_SECONDS
    with _disk_errors("The history cannot be read"):
        for record in read_records(file, after=after, before=before):
            yield record
            if time.monotonic() > deadline:
                raise OutboxError(f"Reading the history took longer than {HISTORY_SECONDS:g} s. Request fewer records.")


@contextmanager
def _disk_errors(message: str) -> Iterator[None]:
    import sqlite3  # noqa: PLC0415

    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise OutboxError(f"{message}: {error}.") from error


class OutboxPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of undelivered records, ordered by sink and sequence."""

    rows: tuple[Delivery, ...]
    next_after: tuple[str, int] | None
    """The argument *after* for the next page, or None on the last page."""


def read_undelivered(
    source: Source,
    *,
    sink: str | None = None,
    states: frozenset[DeliveryState] = NEEDED,
    record_id: str | None = None,
    after: tuple[str, int] | None = None,
    limit: int = PAGE_ROWS,
) -> OutboxPage:
    """Return the undelivered records of *sink*, or of all sinks if *sink* is None."""
    found = source.read(
        lambda state: [
            row
            for row in deliveries.needed_records(state, sink, states, record_id=record_id)
            if after is None or (row.sink, row.sequence) > after
        ]
    )
    rows: list[Delivery] = []
    size = 0
    for row in found:
        if len(rows) >= limit or size > PAGE_BYTES:
            return OutboxPage(rows=tuple(rows), next_after=(rows[-1].sink, rows[-1].sequence))
        size += len(row.body)
        rows.append(row)
    return OutboxPage(rows=tuple(rows), next_after=None)


def retry_records(source: Source, *, sink: str | None = None, record_id: str | None = None) -> int:
    """Retry the parked records of *sink*, or of all sinks if *sink* is None.

    In a running agent, this also resumes sinks that are paused. Returns the number of retried records.
    """
    if sink is not None:
        _require_sinks(source, sink)
        configured = source.sinks()
        if configured is not None and sink not in configured:
            raise OutboxError(
                f"The sink {sink} is not in the agent's configuration, so the agent cannot send its records. To send "
                f"them to another sink, run `outbox move {sink} NEW`."
            )
    count = source.outbox.change(deliveries.retry, sink, record_id=record_id, now=time.time())
    source.on_retry(sink)
    return count


def discard_records(
    source: Source, *, sink: str, states: frozenset[DeliveryState] = NEEDED, record_id: str | None = None
) -> int:
    """Discard undelivered records of *sink*, or only *record_id*. Return their number."""
    _require_sinks(source, sink)
    return source.outbox.change(deliveries.discard, sink, states=states, record_id=record_id, now=time.time())


def move_records(source: Source, *, old: str, new: str) -> int:
    """Move undelivered records between two sinks. Return the number of moved records."""
    _require_sinks(source, old, new)
    if old == new:
        raise OutboxError("OLD and NEW are the same sink.")
    return source.outbox.move(old, new)


def import_records(source: Source, *, path: str) -> int:
    """Import undelivered records and holds from a file. Return the number of imported records."""
    from bridge.outbox.database import read_file  # noqa: PLC0415

    if not Path(path).exists():
        raise OutboxError(
            f"The agent cannot find the file {path}. The service has no access to /tmp, /root, or /home. Copy the "
            "file to the state directory."
        )
    with _disk_errors(f"The file {path} cannot be read"):
        loaded = read_file(Path(path))
    if loaded is None:
        raise OutboxError(f"The file {path} is not a complete outbox of this version.")
    own = (decode_record(body) for _, body in _stored(source.file))
    known = {(record.stream_id, record.sequence) for record in own}
    return source.outbox.change(deliveries.import_rows, loaded.rows, known)


def decide(source: Source, *, decision: StoredDecision, overruled: tuple[int, ...] = ()) -> tuple[StoredDecision, ...]:
    """Store a decision made on this VM. The decision overrules the holds in *overruled*.

    *overruled* contains the arrival numbers of these holds. If the event also has other holds, the function does not
    store the decision, and returns the other holds.
    """
    if not source.is_approving():
        raise OutboxError(
            "The running agent approves nothing, because the configuration that it loaded has no [approval] table. "
            "Reload the agent (`systemctl reload scheduled-events-bridge`), and try again."
        )
    others = source.outbox.change(approvals.keep_overruling, decision, overruled)
    if not others:
        source.on_decision()
    return others


def find_decision(source: Source, *, approver: str, decision_id: str) -> StoredDecision | None:
    """Return a decision that `approve` made on this VM, or None if it is not stored."""
    return source.read(approvals.find_decision, "cli", approver, decision_id)


def why_unsaved(source: Source) -> str | None:
    """Wait up to 0.8 s until the outbox is saved. Return None, or why it is not saved yet."""
    if source.outbox.wait_saved(SAVE_SECONDS):
        return None
    return source.outbox.saver.behind_reason or "The disk is slow."


def _require_sinks(source: Source, *sinks: str) -> None:
    known = source.read(lambda state: list(state.sinks.rows))
    for sink in sinks:
        if sink not in known:
            raise OutboxError(f"Unknown sink {sink!r}. Known sinks: {', '.join(known) or 'none'}.")


_REQUESTS: Mapping[str, Callable[..., object]] = {
    function.__name__: function
    for function in (
        read_status,
        read_events,
        read_undelivered,
        retry_records,
        discard_records,
        move_records,
        import_records,
        decide,
        find_decision,
        why_unsaved,
    )
}
