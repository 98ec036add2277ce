"""Whether a refusal is about the record or about the endpoint, for one sink. Pure: what happened comes in.

A 400 says little: it comes from a TLS port that was spoken to in the clear, and from a receiver that does not know the
secret of a signature. Parking by it would park every record of a fleet. So a refusal that may be about the endpoint
(`DeliveryRejected.may_be_endpoint`) is taken as one

- while the endpoint has accepted nothing since the sink's configuration changed, or a file that it names,
- when different events are refused in a row with nothing accepted between. The first of them was parked by then,
  because its event was the only one; it is taken back.

A record that is refused again after the endpoint has accepted another is refused for its own sake, whatever else is.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge.outbox.deliveries import PendingDelivery


class Refusals:
    """The refusals of one sink; *accepted_under*: the configuration under which the endpoint took something last."""

    def __init__(self, *, accepted_under: str | None) -> None:
        self._accepted_under = accepted_under
        self._acceptances = 0
        self._is_blamed = False
        """The endpoint was to blame for a refusal, and has accepted nothing since."""
        self._refused: dict[int, int] = {}
        """Sequence -> the acceptances so far, of what was refused and is not parked."""
        self._in_a_row: dict[int, str] = {}
        """Sequence -> event key, of what was parked since the endpoint accepted something last."""

    def accepted(self, sequences: Iterable[int], *, under: str) -> bool:
        """Note that the endpoint took these records; return whether they are the first *under* this configuration."""
        is_first, self._accepted_under = self._accepted_under != under, under
        self._acceptances += 1
        self._is_blamed = False
        self._in_a_row.clear()
        for sequence in sequences:
            self._refused.pop(sequence, None)
        return is_first

    def are_about_endpoint(self, batch: list[PendingDelivery], *, under: str) -> bool:
        """Return whether the endpoint is to blame that *batch* was refused *under* this configuration."""
        has_accepted = self._accepted_under == under
        if has_accepted and len(batch) == 1 and self._was_another_accepted_since(batch[0].sequence):
            del self._refused[batch[0].sequence]
            return False
        keys = {row.event_key for row in batch}
        is_another = not keys.issuperset(self._in_a_row.values())
        self._is_blamed = self._is_blamed or is_another or not has_accepted
        if self._is_blamed:
            self._refused.update((row.sequence, self._acceptances) for row in batch)
        elif len(batch) == 1:
            self._in_a_row[batch[0].sequence] = batch[0].event_key
        return self._is_blamed

    def _was_another_accepted_since(self, sequence: int) -> bool:
        """Return whether the endpoint has accepted another record since it refused *sequence*."""
        return self._refused.get(sequence, self._acceptances) < self._acceptances

    def take_back(self) -> list[int]:
        """Return the sequences that were parked since the endpoint accepted something; they are not parked any more."""
        sequences = list(self._in_a_row)
        self._refused.update(dict.fromkeys(sequences, self._acceptances))
        self._in_a_row.clear()
        return sequences
