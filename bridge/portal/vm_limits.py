"""Limits the records of each VM, and counts refused records for the audit.

Each VM can send `records_per_minute` records per minute, in one request or in several requests. If the portal accepts a
request, all records in the request count, even if they exceed the limit. The VM must then wait longer before its next
request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from bridge.clock import Clock

_MINUTE_SECONDS = 60.0
_MOST_VMS = 50_000


class VmLimits:
    """The recent records of each VM at this process."""

    def __init__(self, records_per_minute: int, *, clock: Clock) -> None:
        self._each_seconds = _MINUTE_SECONDS / records_per_minute
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()
        self._refused: Counter[tuple[str, str]] = Counter()

    def take(self, vm_keys: Iterable[str]) -> float:
        """Count one record of each of *vm_keys*.

        Return the seconds to wait if a VM has sent too many, or 0.
        """
        now, counts = self._clock.monotonic(), Counter(vm_keys)
        waits = {key: self._free_at.get(key, 0.0) - now - _MINUTE_SECONDS + self._each_seconds for key in counts}
        over = {key: wait for key, wait in waits.items() if wait > 0}
        for key in over:
            self.note_refusal(key, "rate")
        if over:
            return max(over.values())
        for key, number in counts.items():
            self._free_at[key] = max(now, self._free_at.get(key, now)) + number * self._each_seconds
            self._free_at.move_to_end(key)
        while len(self._free_at) > _MOST_VMS:
            self._free_at.popitem(last=False)
        return 0.0

    def note_refusal(self, vm_key: str, reason: str) -> None:
        """Count a refused request of *vm_key*, for the audit."""
        if (vm_key, reason) in self._refused or len(self._refused) < _MOST_VMS:
            self._refused[vm_key, reason] += 1

    def take_refusals(self) -> dict[tuple[str, str], int]:
        """Return and reset the number of refused requests by VM and reason."""
        found, self._refused = dict(self._refused), Counter()
        return found
