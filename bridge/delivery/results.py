"""What became of one sink's records, written into the outbox while the next ones are already being sent.

A crash in between sends again with the same id, which is promised (at least once), and a slow disk does not slow a
backlog down. Until a result is written the outbox still lists its row as pending, so those who read pending rows leave
it out (`unwritten`).

Deliveries are gathered first, up to 100 records or 20 ms: a transaction for each batch of a few records costs more than
sending them. The transaction itself waits up to 20 ms more for the other sinks. A crash then repeats so many records
more, also one during a send that hangs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
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
    """Writes the results of the sink called *sink*; for one thread."""

    def __init__(self, outbox: Outbox, *, sink: str, clock: Clock) -> None:
        self._outbox = outbox
        self._sink = sink
        self._clock = clock
        self._underway: deque[tuple[Future[None], list[DeliveryResult]]] = deque()
        self._unwritten: set[int] = set()
        self._gathered: list[DeliveryResult] = []
        self._gathered_since = 0.0
        self._refused: list[DeliveryResult] = []
        self._retry_at = 0.0
        self._accepted_under: str | None = None
        self._report = ThrottledLog(logger, clock=clock)

    @property
    def unwritten(self) -> frozenset[int]:
        """The sequences of rows that are done with, but that the outbox may still list as pending."""
        self.wait(most=_MOST_UNDERWAY)
        return frozenset(self._unwritten)

    def tried(self, rows: Sequence[PendingDelivery], error: str) -> None:
        """Write that *rows* were tried in vain."""
        self.flush()
        self._write(_results(rows, None, error))

    def finished(self, rows: Sequence[PendingDelivery], state: DeliveryState, error: str | None = None) -> None:
        """Write that *rows* are done with, in *state*."""
        self._unwritten.update(row.sequence for row in rows)
        if not self._gathered:
            self._gathered_since = self._clock.monotonic()
        self._gathered.extend(_results(rows, state, error))
        is_late = self._clock.monotonic() - self._gathered_since >= _GATHER_SECONDS
        if state is not DeliveryState.DELIVERED or is_late or len(self._gathered) >= _MOST_GATHERED:
            self.flush()

    def accepted_under(self, configuration: str) -> None:
        """Write with the next results that the destination takes records under *configuration*, a digest."""
        self._accepted_under = configuration

    def take_back(self, sequences: Collection[int]) -> None:
        """Have what was parked pending again; raise OutboxError when that cannot be written."""
        self.wait()
        self._refused = [result for result in self._refused if result.sequence not in sequences]
        self._unwritten.difference_update(sequences)
        now = self._clock.timestamp()
        self._outbox.write(deliveries.unpark, self._sink, sequences, now=now).result()

    def flush(self) -> None:
        """Hand what was gathered to the outbox."""
        if self._gathered or self._accepted_under is not None:
            gathered, self._gathered = self._gathered, []
            self._write(gathered)

    def wait(self, *, most: int = 0) -> None:
        """Forget what is committed; wait until at most *most* commits are on their way, and with 0 nothing is left."""
        if most == 0:
            self.flush()
        while self._underway and (len(self._underway) > most or self._underway[0][0].done()):
            future, results = self._underway.popleft()
            try:
                future.result()
            except OutboxError as error:
                self._keep(results, error)
            else:
                self._unwritten.difference_update(result.sequence for result in results)

    def retry_unwritten(self) -> None:
        """Try once more, now and then, to write what the outbox refused."""
        self.flush()
        self.wait(most=_MOST_UNDERWAY)
        if self._refused and self._clock.monotonic() >= self._retry_at:
            again, self._refused = self._refused, []
            self._write(again)

    def forget(self) -> None:
        """Drop what could not be written: its rows are gone."""
        self._refused.clear()
        self._gathered.clear()
        self._unwritten.clear()

    def _write(self, results: list[DeliveryResult]) -> None:
        try:
            # What was delivered together is committed together, with other sinks' too; what failed counts at once.
            is_delivered = all(result.state is DeliveryState.DELIVERED for result in results)
            write = self._outbox.write_soon if is_delivered else self._outbox.write
            now = self._clock.timestamp()
            written = write(
                deliveries.record_results, self._sink, results, now=now, accepted_under=self._accepted_under
            )
            self._accepted_under = None
            self._underway.append((written, results))
        except OutboxError as error:
            self._keep(results, error)
        self.wait(most=_MOST_UNDERWAY)

    def _keep(self, results: list[DeliveryResult], error: OutboxError) -> None:
        """Remember what could not be written: at least this agent does not send those records over and over."""
        self._refused.extend(result for result in results if result.state is not None)
        self._retry_at = self._clock.monotonic() + _RETRY_SECONDS
        self._report.problem(
            self._sink,
            logging.ERROR,
            f"What became of records could not be written down; unless it is, they come again after a restart. {error}",
            sink=self._sink,
        )


def _results(rows: Sequence[PendingDelivery], state: DeliveryState | None, error: str | None) -> list[DeliveryResult]:
    reason = None if error is None else error[:_ERROR_CHARACTERS]
    return [DeliveryResult(sequence=row.sequence, state=state, error=reason) for row in rows]
