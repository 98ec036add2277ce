"""The requests of commands to an agent, and their answers.

    page = client.ask(Events(limit=20))

A command asks a running agent over the control socket (`bridge.agent.control.ControlClient`). Without an agent, it asks
an `Outbox` that it opened itself, or the stored outbox (`bridge.agent.handlers`). All three take the same requests and
return the same answers.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

from bridge.clock import parse_time
from bridge.events.event import Document, VmIdentity
from bridge.events.record import TransitionRecord
from bridge.health.readiness import Readiness
from bridge.outbox.deliveries import OutboxTotals
from bridge.outbox.rows import DeliveryState, PendingApproval, StoredDecision

A = TypeVar("A")


class Request(msgspec.Struct, Generic[A], frozen=True, kw_only=True, tag_field="request"):
    """One request; A is the class of the answer."""


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """An agent answered."""


class Ping(Request[Pong], frozen=True, kw_only=True, tag="ping"):
    """Find out whether an agent runs."""


class LastError(msgspec.Struct, frozen=True, kw_only=True):
    """The newest error of a sink."""

    message: str
    at: float
    """Unix seconds."""


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `status` shows, from one moment."""

    stream_id: str
    vm: VmIdentity | None
    document: Document | None
    last_good_at: str | None
    newest_record_at: float | None
    totals: OutboxTotals
    last_errors: dict[str, LastError]
    """By sink, of its pending and parked records."""
    last_transitions: dict[str, TransitionRecord]
    """By event key, the newest record that Azure caused, of each active event."""
    decisions: tuple[StoredDecision, ...]
    """The open decisions."""
    approvals: tuple[PendingApproval, ...]
    readiness: Readiness | None
    """None without an agent."""
    active_event_ids: tuple[str, ...] | None = None
    """The EventIds of the tracked document, as in a record. None without an agent, and while they are unknown."""
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
