"""Whether a refusal is about the record or about the endpoint, for one sink. Pure: what happened comes in.

A 400 says little: it comes from a TLS port that was spoken to in the clear, and from a receiver that does not know the
secret of a signature. Parking by it would park every record of a fleet. So a refusal that may be about the endpoint
(`DeliveryRejected.may_be_endpoint`) is taken as one

- while the endpoint has accepted nothing since the sink's configuration changed,
- when different events are refused in a row with nothing accepted between. The first of them was parked by then,
  because its event was the only one; it is taken back.

A record that is refused again after the endpoint has accepted another is refused for its own sake, whatever else is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from bridge.outbox.deliveries import PendingDelivery
from bridge.sink import Sink, SinkConfig


def configuration_digest(sink_class: type[Sink], config: SinkConfig) -> str:
    """Return a text that changes with the sink's configuration, and shows nothing of it."""
    values = f"{sink_class.__module__}.{sink_class.__qualname__} {msgspec.structs.asdict(config)!r}"
    return hashlib.sha256(values.encode("utf-8", "backslashreplace")).hexdigest()


class Refusals:
    """The refusals of one sink; *has_accepted*: the endpoint took something under this configuration before."""

    def __init__(self, *, has_accepted: bool) -> None:
        self._has_accepted = has_accepted
        self._acceptances = 0
        self._is_blamed = False
        """The endpoint was to blame for a refusal, and has accepted nothing since."""
        self._refused: dict[int, int] = {}
        """Sequence -> the acceptances so far, of what was refused and is not parked."""
        self._in_a_row: dict[int, str] = {}
        """Sequence -> event key, of what was parked since the endpoint accepted something last."""

    def accepted(self, sequences: Iterable[int]) -> bool:
        """Note that the endpoint took these records; return whether they are the first under this configuration."""
        is_first, self._has_accepted = not self._has_accepted, True
        self._acceptances += 1
        self._is_blamed = False
        self._in_a_row.clear()
        for sequence in sequences:
            self._refused.pop(sequence, None)
        return is_first

    def are_about_endpoint(self, batch: list[PendingDelivery]) -> bool:
        """Return whether the endpoint is to blame that *batch* was refused, and not a record of it."""
        if len(batch) == 1 and self._refused.get(batch[0].sequence, self._acceptances) < self._acceptances:
            del self._refused[batch[0].sequence]
            return False
        keys = {row.event_key for row in batch}
        is_another = not keys.issuperset(self._in_a_row.values())
        self._is_blamed = self._is_blamed or is_another or not self._has_accepted
        if self._is_blamed:
            self._refused.update((row.sequence, self._acceptances) for row in batch)
        elif len(batch) == 1:
            self._in_a_row[batch[0].sequence] = batch[0].event_key
        return self._is_blamed

    def take_back(self) -> list[int]:
        """Return the sequences that were parked since the endpoint accepted something; they are not parked any more."""
        sequences = list(self._in_a_row)
        self._refused.update(dict.fromkeys(sequences, self._acceptances))
        self._in_a_row.clear()
        return sequences
