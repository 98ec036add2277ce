"""The ways in which a metadata service fails, and the queue of failures that are to come.

A fault stands for a count of requests, or until it is cleared. Faults queue: the oldest that fits a request and has
requests left is taken, so "three times 500, then two times 429" is two faults. Delays are real seconds, whatever
the speed of the scenario, because the deadlines they try are real.
"""

from __future__ import annotations

import threading
from typing import Annotated, Literal, get_args

import msgspec

from bridge.config.toml import Check
from bridge.text import nearest

#: Each kind of fault, with what a client sees.
KINDS = {
    "slow": "the right answer, after delay_seconds",
    "status": "the given status, with Retry-After when retry_after_seconds is given",
    "empty": "200 with no body",
    "truncated": "200 with the first half of the body, as if that were all",
    "cut": "200, the connection closes in the middle of the body",
    "garbage": "200 with a body that is no JSON",
    "oversize": "200 with the right body followed by 5 MiB of blanks",
    "silence": "the request is read and never answered",
    "drip": "the right answer, a byte every delay_seconds",
    "disconnect": "the connection closes without an answer",
    "redirect": "302 to location",
}
#: What a portal sees of an attested document that one of these strikes; they strike nothing else, whatever the target.
DOCUMENT_KINDS = {
    "cached_nonce": "the document of an earlier request, with that one's nonce",
    "tampered": "a document whose content was changed after it was signed",
}
KINDS |= DOCUMENT_KINDS
#: What a fault strikes: the events document, the instance document, the managed identity's token, the attested
#: document, or all of them.
Target = Literal["scheduledevents", "identity", "token", "attested", "all"]
TARGETS = get_args(Target)

_DEFAULT_DELAY_SECONDS = {"slow": 5.0, "drip": 0.2}


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"one of {', '.join(sorted(KINDS))}", nearest(kind, KINDS))


Kind = Annotated[str, Check(_check_kind)]


class FaultDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a fault strikes, and how."""

    target: Target = "scheduledevents"
    method: Literal["GET", "POST", "any"] = "any"
    vm: str | None = None
    """Strike only the requests of this VM. None: of every VM."""
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The number of requests to strike. None: until cleared."""
    status: Annotated[int, msgspec.Meta(ge=200, le=599)] = 500
    retry_after_seconds: Annotated[int, msgspec.Meta(ge=0)] | None = None
    delay_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    """Real seconds. None: 5 for slow, 0.2 for drip."""
    location: str | None = None
    """Where a redirect points. None: /elsewhere on the same server."""
    body: str | None = None
    """The body to send in place of the kind's own."""


class Fault(FaultDetails, frozen=True, kw_only=True):
    """One way to fail; see `KINDS`."""

    kind: Kind

    @property
    def delay(self) -> float:
        """Return the delay in real seconds."""
        return _DEFAULT_DELAY_SECONDS.get(self.kind, 0.0) if self.delay_seconds is None else self.delay_seconds

    def strikes(self, target: str, method: str, vm: str) -> bool:
        """Return whether a request of *vm* falls to this fault."""
        wanted = "attested" if self.kind in DOCUMENT_KINDS else self.target
        return wanted in (target, "all") and self.method in (method, "any") and self.vm in (vm, None)


class FaultQueue:
    """The faults to come; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Queue *fault* behind the others."""
        with self._lock:
            self._faults.append(fault)

    def clear(self, target: str = "all") -> None:
        """Forget every fault of *target*; "all" forgets everything."""
        with self._lock:
            self._faults = [fault for fault in self._faults if target not in ("all", fault.target)]

    def waiting(self) -> tuple[Fault, ...]:
        """Return the faults that are still to come, oldest first."""
        with self._lock:
            return tuple(self._faults)

    def take(self, target: str, method: str, vm: str) -> Fault | None:
        """Return the fault that strikes this request, counted; None when none does."""
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.strikes(target, method, vm):
                    self._count(index, fault)
                    return fault
        return None

    def _count(self, index: int, fault: Fault) -> None:
        if fault.count is None:
            return
        if fault.count > 1:
            self._faults[index] = msgspec.structs.replace(fault, count=fault.count - 1)
        else:
            del self._faults[index]
