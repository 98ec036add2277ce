"""Queues and simulates faults of the metadata service.

A fault applies to a number of requests, or until someone removes the fault. Each request gets the oldest fault in the
queue that applies to the request. For example, to simulate three responses with status 500 and then two with status
429, add two faults. Delays are in real seconds at every scenario speed, because the agent's deadlines are also in
real seconds.
"""

from __future__ import annotations

import threading
from typing import Annotated, Literal, get_args

import msgspec

from bridge.config.toml import Check
from bridge.text import nearest

#: The kinds of faults and their effects.
KINDS = {
    "slow": "the correct response after delay_seconds",
    "status": "the status, with Retry-After if retry_after_seconds is set",
    "empty": "200 without a body",
    "truncated": "200 with only the first half of the body and a matching Content-Length",
    "cut": "200, and the connection closes in the middle of the body",
    "garbage": "200 with a body that is not JSON",
    "oversize": "200 with the correct body and 5 MiB of spaces",
    "silence": "no response, although the request is read",
    "drip": "the correct response, with one byte every delay_seconds",
    "disconnect": "the connection closes without a response",
    "redirect": "302 to location",
}
#: Faults of attested documents. They apply only to requests for a document, regardless of the target.
DOCUMENT_KINDS = {
    "cached_nonce": "the document of an earlier request, with its nonce",
    "tampered": "a document that was changed after it was signed",
}
KINDS |= DOCUMENT_KINDS
#: The requests to which a fault applies: the events document, the instance document, the token of the managed
#: identity, the attested document, or all of them.
Target = Literal["scheduledevents", "identity", "token", "attested", "all"]
TARGETS = get_args(Target)

_DEFAULT_DELAY_SECONDS = {"slow": 5.0, "drip": 0.2}


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"one of {', '.join(sorted(KINDS))}", nearest(kind, KINDS))


Kind = Annotated[str, Check(_check_kind)]


class FaultDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to which a fault applies, and its parameters."""

    target: Target = "scheduledevents"
    method: Literal["GET", "POST", "any"] = "any"
    vm: str | None = None
    """The VM to whose requests the fault applies. None means all VMs."""
    api_version: str | None = None
    """The api-version to whose requests the fault applies. None means all versions. A status 400 without `count`
    simulates a service that does not support the version."""
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The number of requests to which the fault applies. If None, the fault applies until someone removes it."""
    status: Annotated[int, msgspec.Meta(ge=200, le=599)] = 500
    retry_after_seconds: Annotated[int, msgspec.Meta(ge=0)] | None = None
    delay_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    """The delay in real seconds. None means 5 for slow and 0.2 for drip."""
    location: str | None = None
    """The target of a redirect. None means /elsewhere on the same server."""
    body: str | None = None
    """The response's body. The default depends on the kind of the fault."""


class Fault(FaultDetails, frozen=True, kw_only=True):
    """One fault. `KINDS` lists the kinds."""

    kind: Kind

    @property
    def delay(self) -> float:
        """Return the delay in real seconds."""
        return _DEFAULT_DELAY_SECONDS.get(self.kind, 0.0) if self.delay_seconds is None else self.delay_seconds

    def strikes(self, target: str, method: str, vm: str, api_version: str) -> bool:
        """Return whether the fault applies to a request of *vm*."""
        wanted = "attested" if self.kind in DOCUMENT_KINDS else self.target
        is_wanted = wanted in (target, "all") and self.method in (method, "any")
        return is_wanted and self.vm in (vm, None) and self.api_version in (api_version, None)


class FaultQueue:
    """The queue of faults. Threads can share a queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Add *fault* to the end of the queue."""
        with self._lock:
            self._faults.append(fault)

    def clear(self, target: str = "all") -> None:
        """Remove the faults of *target*. The target "all" removes all faults."""
        with self._lock:
            self._faults = [fault for fault in self._faults if target not in ("all", fault.target)]

    def waiting(self) -> tuple[Fault, ...]:
        """Return the faults in the queue, oldest first."""
        with self._lock:
            return tuple(self._faults)

    def take(self, target: str, method: str, vm: str, api_version: str = "") -> Fault | None:
        """Return the fault for this request, or None. Count the request."""
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.strikes(target, method, vm, api_version):
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
