"""Which agents ask for decisions, and what each said of itself when it last did (PROTOCOL.md, section 2).

Kept in memory, since every poll changes it. An agent that asks no more is forgotten within minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bridge.clock import Clock
from bridge.portal.signing import AgentSeen

HEADER = "scheduled-events-agent"
_LONGEST = 8_192
#: A poll lasts at most 600 s; an agent that is there has the next one open within a second.
_FORGOTTEN_SECONDS = 700.0
_FORGETS_EVERY_SECONDS = 60.0
_AWAY_SECONDS = 15.0


class _Said(msgspec.Struct, frozen=True):
    version: str | None = None
    kids: tuple[str, ...] | None = None
    required_approvals: int | None = None
    dry_run: bool | None = None
    disabled: bool | None = None


class _Seen(msgspec.Struct):
    at: float
    said: _Said
    open_polls: int = 0
    received_index: int = 0


_decode = msgspec.json.Decoder(_Said).decode


class Connections:
    """The agents that ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._forgets_at = 0.0

    def begins(self, vm_key: str, header: str, *, index: int = 0) -> None:
        """Note that a poll of *vm_key* begins, with what its agent says in *header*, for what comes after *index*."""
        if self._clock.monotonic() >= self._forgets_at:
            self._forget()
        known = self._seen.get(vm_key)
        open_polls = 1 if known is None else known.open_polls + 1
        self._seen[vm_key] = _Seen(
            at=self._clock.monotonic(), said=_read(header), open_polls=open_polls, received_index=index
        )

    def ends(self, vm_key: str) -> None:
        """Note that a poll of *vm_key* was answered, or lost."""
        known = self._seen.get(vm_key)
        if known is not None:
            known.open_polls -= 1
            known.at = self._clock.monotonic()

    def of(self, vm_keys: Iterable[str]) -> dict[str, AgentSeen]:
        """Return what is known of those of *vm_keys* that ever asked."""
        seen = self._seen  # a thread of the store asks, too
        return {key: self._shown(seen[key]) for key in vm_keys if key in seen}

    def all(self) -> dict[str, AgentSeen]:
        """Return what is known of every agent that ever asked."""
        return self.of(self._seen)

    def _forget(self) -> None:
        """Forget the agents that have not asked for longer than any poll lasts."""
        self._forgets_at = self._clock.monotonic() + _FORGETS_EVERY_SECONDS
        oldest = self._clock.monotonic() - _FORGOTTEN_SECONDS
        self._seen = {key: seen for key, seen in self._seen.items() if seen.open_polls > 0 or seen.at >= oldest}

    def _shown(self, seen: _Seen) -> AgentSeen:
        # Between two polls an agent is away for a second at most; one that is worse off is not there.
        is_connected = seen.open_polls > 0 or self._clock.monotonic() - seen.at < _AWAY_SECONDS
        said = seen.said
        return AgentSeen(
            is_connected=is_connected,
            version=said.version,
            kids=said.kids,
            required_approvals=said.required_approvals,
            dry_run=said.dry_run,
            disabled=said.disabled,
            received_index=seen.received_index,
        )


def _read(header: str) -> _Said:
    """Return what *header* says; nothing, where it is none of the protocol's."""
    try:
        return _decode(header[:_LONGEST].encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _Said()
