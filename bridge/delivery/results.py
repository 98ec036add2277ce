"""What became of one sink's records, on its way into the outbox.

It is written down while the next record is already being sent: a crash in between sends again with the same id, which
is promised (at least once), and a slow disk does not slow a backlog down. Until it is written the outbox still lists
those rows as owed, so whoever reads it leaves them out (`unwritten`).

What was delivered is gathered first, up to 100 records or 20 ms: a transaction for each batch of a few records costs
more than sending them. A crash then repeats so many records more, also one during a send that hangs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from bridge.clock import Clock
from bridge.errors import OutboxError
from bridge.logs import ThrottledLog
from bridge.outbox import deliveries
from bridge.outbox.deliveries import DeliveryResult, DeliveryState, PendingDelivery
from bridge.outbox.outbox import Outbox

logger = logging.getLogger(__name__)

#: Commits under way; each may be of as much as is gathered.
_MOST_UNDERWAY = 8
_MOST_GATHERED = 100
_GATHER_SECONDS = 0.02
_RETRY_SECONDS = 5.0
_ERROR_CHARACTERS = 256


class ResultWriter:
    """Settles the rows of the sink called *sink*; for one thread."""

    def __init__(self, outbox: Outbox, *, sink: str, clock: Clock) -> None:
        self._outbox = outbox
        self._sink = sink
        self._clock = clock
        self._underway: deque[tuple[Future[None], list[DeliveryResult]]] = deque()
        self._unwritten: dict[int, DeliveryResult] = {}
        self._gathered: list[DeliveryResult] = []
        self._gathered_since = 0.0
        self._failed: list[DeliveryResult] = []
        self._retry_at = 0.0
        self._report = ThrottledLog(logger, clock=clock)

    @property
    def unwritten(self) -> frozenset[int]:
        """The sequences of rows that are done with, but that the outbox may still list as owed."""
        self.wait(most=_MOST_UNDERWAY)
        return frozenset(self._unwritten)

    def tried(self, rows: Sequence[PendingDelivery], error: str) -> None:
        """Write down that *rows* were tried in vain."""
        self.flush()
        reason = error[:_ERROR_CHARACTERS]
        self._settle([DeliveryResult(sequence=row.sequence, state=None, error=reason) for row in rows])

    def finished(self, rows: Sequence[PendingDelivery], state: DeliveryState, error: str | None = None) -> None:
        """Write down that *rows* are done with, in *state*."""
        reason = None if error is None else error[:_ERROR_CHARACTERS]
        outcomes = [DeliveryResult(sequence=row.sequence, state=state, error=reason) for row in rows]
        for outcome in outcomes:
            self._unwritten[outcome.sequence] = outcome
        if not self._gathered:
            self._gathered_since = self._clock.monotonic()
        self._gathered.extend(outcomes)
        is_late = self._clock.monotonic() - self._gathered_since >= _GATHER_SECONDS
        if state is not DeliveryState.DELIVERED or is_late or len(self._gathered) >= _MOST_GATHERED:
            self.flush()

    def flush(self) -> None:
        """Hand what was gathered to the outbox."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._settle(gathered)

    def wait(self, *, most: int = 0) -> None:
        """Forget what is committed; wait until at most *most* commits are on their way, and with 0 nothing is left."""
        if most == 0:
            self.flush()
        while self._underway and (len(self._underway) > most or self._underway[0][0].done()):
            future, outcomes = self._underway.popleft()
            try:
                future.result()
            except OutboxError as error:
                self._keep(outcomes, error)
            else:
                for outcome in outcomes:
                    self._unwritten.pop(outcome.sequence, None)

    def write_again(self) -> None:
        """Try once more, now and then, to write down what the outbox would not take."""
        self.flush()
        self.wait(most=_MOST_UNDERWAY)
        if self._failed and self._clock.monotonic() >= self._retry_at:
            again, self._failed = self._failed, []
            self._settle(again)

    def forget(self) -> None:
        """Let go of what could not be written: the rows it was about are gone."""
        self._failed.clear()
        self._gathered.clear()
        self._unwritten.clear()

    def _settle(self, outcomes: list[DeliveryResult]) -> None:
        try:
            now = self._clock.timestamp()
            written = self._outbox.write(deliveries.record_results, self._sink, outcomes, now=now)
            self._underway.append((written, outcomes))
        except OutboxError as error:
            self._keep(outcomes, error)
        self.wait(most=_MOST_UNDERWAY)

    def _keep(self, outcomes: list[DeliveryResult], error: OutboxError) -> None:
        """Remember what could not be written: at least this agent does not send those records over and over."""
        self._failed.extend(outcome for outcome in outcomes if outcome.state is not None)
        self._retry_at = self._clock.monotonic() + _RETRY_SECONDS
        self._report.problem(
            self._sink,
            logging.ERROR,
            f"What became of records could not be written down; unless it is, they come again after a restart. {error}",
            sink=self._sink,
        )
