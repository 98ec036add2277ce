"""Decides whether the record or the endpoint caused a rejection.

A rejection such as 400 does not always mean that the record is wrong. For example, a TLS port returns 400 to plain
HTTP, and a receiver with another signing secret returns 400 to every request. If the agent parked the records in these
cases, a wrong setting would park every record of a fleet. A sink marks such a rejection with
`DeliveryRejected.may_be_endpoint`. The endpoint is then the cause in two cases:

- The endpoint has not accepted any record since the sink's configuration or a file that it names was changed.
- The endpoint rejects records of different events in a row, and accepts no record in between. By the time the agent
  detects this case, it has already parked the first of these records, so it makes that record pending again.

If the endpoint rejects a record twice but accepts other records in between, the agent parks the rejected record.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from bridge.config.settings import SinkSettings
from bridge.system.secrets import ChangingFile


class Refusals:
    """Tracks a sink's rejections. *accepted_under* is the last working configuration's digest."""

    def __init__(self, *, accepted_under: str | None) -> None:
        self._accepted_under = accepted_under
        self._acceptances = 0
        self._is_blamed = False
        """True if the endpoint caused a rejection and has not accepted a record after it."""
        self._refused: dict[int, int] = {}
        """Maps the sequence of each record that was rejected but not parked to the number of acceptances before it."""
        self._in_a_row: dict[int, str] = {}
        """Maps the sequence of each record that was parked since the last acceptance to the key of its event."""

    def accepted(self, sequences: Iterable[int], *, under: str) -> bool:
        """Record that the endpoint accepted records.

        *under* is the digest of the sink's current settings. Returns True if the endpoint accepted records for the
        first time since these settings changed.
        """
        is_first, self._accepted_under = self._accepted_under != under, under
        self._acceptances += 1
        self._is_blamed = False
        self._in_a_row.clear()
        for sequence in sequences:
            self._refused.pop(sequence, None)
        return is_first

    def are_about_endpoint(self, events: Mapping[int, str], *, under: str) -> bool:
        """Return whether the endpoint caused a rejection. *events* maps sequences to event keys."""
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
        """Return the sequences parked since the last acceptance, and clear this list."""
        sequences = list(self._in_a_row)
        self._refused.update(dict.fromkeys(sequences, self._acceptances))
        self._in_a_row.clear()
        return sequences


def configuration_digest(sink: SinkSettings) -> str:
    """Return a hash that changes when the sink's configuration changes.

    The hash covers the sink's settings and the contents of the files and environment variables that its ``*_file`` and
    ``*_env`` settings name. Call this function only on the sink's thread, because reading a file can hang if a file
    server is down.
    """
    keys = msgspec.structs.asdict(sink.config)
    found: list[object] = [sink.sink_class.__module__, sink.sink_class.__qualname__, keys]
    for key, value in keys.items():
        if isinstance(value, str) and key.endswith("_env"):
            found.append(os.environ.get(value))
        elif isinstance(value, str) and key.endswith("_file"):
            found.append(_content(Path(value)))
    return hashlib.sha256(repr(found).encode("utf-8", "backslashreplace")).hexdigest()


def _content(path: Path) -> bytes | None:
    try:
        return ChangingFile(path, bytes).value()
    except (OSError, ValueError):  # the sink reports the error; an invalid path causes a ValueError
        return None
