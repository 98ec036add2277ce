"""Decides for one sink whether a rejection is about the record or about the endpoint.

A 400 has several causes. It comes from a TLS port that receives plain HTTP, and from a receiver that does not know the
secret of a signature. If the agent parked records for these causes, it would park every record of a fleet. A rejection
that may be about the endpoint (`DeliveryRejected.may_be_endpoint`) therefore counts as one in two cases:

- The endpoint has accepted nothing since the configuration of the sink, or a file that it names, changed.
- The endpoint rejects different events in a row and accepts nothing in between. The first of these records was already
  parked, and becomes pending again.

If a record is rejected again after the endpoint accepted another record, the record itself is the cause.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from bridge.sink import Sink, SinkConfig
from bridge.system.secrets import ChangingFile


class Refusals:
    """The rejections of one sink. *accepted_under*: the configuration at the last acceptance."""

    def __init__(self, *, accepted_under: str | None) -> None:
        self._accepted_under = accepted_under
        self._acceptances = 0
        self._is_blamed = False
        """True if the endpoint caused a rejection and has accepted nothing since."""
        self._refused: dict[int, int] = {}
        """By sequence of a rejected record that is not parked, the acceptances before the rejection."""
        self._in_a_row: dict[int, str] = {}
        """By sequence, the event keys of the records that were parked since the last acceptance."""

    def accepted(self, sequences: Iterable[int], *, under: str) -> bool:
        """Note accepted records; return whether they are the first *under* this configuration."""
        is_first, self._accepted_under = self._accepted_under != under, under
        self._acceptances += 1
        self._is_blamed = False
        self._in_a_row.clear()
        for sequence in sequences:
            self._refused.pop(sequence, None)
        return is_first

    def are_about_endpoint(self, events: Mapping[int, str], *, under: str) -> bool:
        """Return whether the endpoint is the cause of a rejection *under* this configuration.

        *events* has the event key of each rejected record, by sequence.
        """
        has_accepted = self._accepted_under == under
        sequence = next(iter(events))
        if has_accepted and len(events) == 1 and self._refused.get(sequence, self._acceptances) < self._acceptances:
            del self._refused[sequence]
            return False
        is_another = not set(events.values()).issuperset(self._in_a_row.values())
        self._is_blamed = self._is_blamed or is_another or not has_accepted
        if self._is_blamed:
            self._refused.update(dict.fromkeys(events, self._acceptances))
        elif len(events) == 1:
            self._in_a_row.update(events)
        return self._is_blamed

    def take_back(self) -> list[int]:
        """Return the sequences that were parked since the last acceptance; they no longer count as parked."""
        sequences = list(self._in_a_row)
        self._refused.update(dict.fromkeys(sequences, self._acceptances))
        self._in_a_row.clear()
        return sequences


def configuration_digest(sink_class: type[Sink], config: SinkConfig) -> str:
    """Return a text that changes with the configuration of the sink and does not reveal it.

    It covers the table of the sink, and the file or variable that each key ending in ``_file`` or ``_env`` names. Call
    it only where a file system that hangs does no harm.
    """
    keys = msgspec.structs.asdict(config)
    found: list[object] = [sink_class.__module__, sink_class.__qualname__, keys]
    for key, value in keys.items():
        if isinstance(value, str) and key.endswith("_env"):
            found.append(os.environ.get(value))
        elif isinstance(value, str) and key.endswith("_file"):
            found.append(_content(Path(value)))
    return hashlib.sha256(repr(found).encode("utf-8", "backslashreplace")).hexdigest()


def _content(path: Path) -> bytes | None:
    try:
        return ChangingFile(path, bytes).value()
    except (OSError, ValueError):  # the sink reports it; a ValueError comes from an invalid path
        return None
