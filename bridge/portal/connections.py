"""Which agents ask for decisions, and what each said of itself when it last did (PROTOCOL.md, section 2).

Kept in memory, since every poll changes it; `bridge.portal.neighbours` brings what other processes of the portal know.
An agent that asks no more is forgotten within minutes. Until then it is kept packed: a few small objects of each,
strewn about in what thousands of lost connections leave free, would keep all of that from being given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache

import msgspec

from bridge.clock import Clock, format_time, parse_time
from bridge.portal.signing import AgentSeen
from bridge.portal.store.agents import SharedAgent

HEADER = "scheduled-events-agent"
_LONGEST = 8_192
#: A poll lasts at most 600 s; an agent that is there has the next one open within a second.
FORGOTTEN_SECONDS = 700.0
#: For so long a poll that another process holds counts, unless that says again that it does.
HELD_SECONDS = 90.0
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


class _Told(msgspec.Struct, frozen=True):
    """What processes tell each other of an agent."""

    is_held: bool
    said: _Said


_decode = msgspec.json.Decoder(_Said).decode
_told_of = msgspec.json.Decoder(_Told).decode
#: As JSON, which has room for all that a header can say; a number in it may have hundreds of digits.
_unpack = msgspec.json.Decoder(dict[str, _Seen]).decode
_pack = msgspec.json.Encoder().encode


class Connections:
    """The agents that ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._away = _pack({})
        self._elsewhere: dict[str, _Seen] = {}
        self._untold: set[str] = set()

    def begins(self, vm_key: str, header: str, *, index: int = 0) -> None:
        """Note that a poll of *vm_key* begins, with what its agent says in *header*, for what comes after *index*."""
        known = self._seen.get(vm_key)
        open_polls = 1 if known is None else known.open_polls + 1
        self._seen[vm_key] = _Seen(
            at=self._clock.monotonic(), said=_read(header), open_polls=open_polls, received_index=index
        )
        self._untold.add(vm_key)

    def ends(self, vm_key: str) -> None:
        """Note that a poll of *vm_key* was answered, or lost."""
        known = self._seen.get(vm_key)
        if known is not None:
            known.open_polls -= 1
            known.at = self._clock.monotonic()
            self._untold.add(vm_key)

    def of(self, vm_keys: Iterable[str]) -> dict[str, AgentSeen]:
        """Return what is known of those of *vm_keys* that ever asked; a thread of the store asks, too."""
        return self._shown_of(vm_keys, self._here(), self._elsewhere)

    def all(self) -> dict[str, AgentSeen]:
        """Return what is known of every agent that ever asked."""
        here, elsewhere = self._here(), self._elsewhere
        return self._shown_of({**here, **elsewhere}, here, elsewhere)

    def told(self, *, is_everything: bool) -> list[SharedAgent]:
        """Return what has changed here since this was asked last, or everything, for the other processes."""
        here = self._here() if is_everything else self._seen
        keys = here.keys() if is_everything else self._untold & here.keys()
        self._untold = set()
        now, monotonic = self._clock.now(), self._clock.monotonic()
        told = []
        for key in keys:
            seen = here[key]
            ago = 0.0 if seen.open_polls > 0 else monotonic - seen.at
            body = msgspec.json.encode(_Told(is_held=seen.open_polls > 0, said=seen.said)).decode()
            asked_at = format_time(now - timedelta(seconds=ago))
            told.append(SharedAgent(vm_key=key, asked_at=asked_at, received_index=seen.received_index, body=body))
        return told

    def hear(self, elsewhere: Iterable[SharedAgent]) -> None:
        """Take what all other processes know, in place of what they knew before; any one thread may do so."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        found: dict[str, _Seen] = {}
        for each in elsewhere:
            ago = (now - parse_time(each.asked_at)).total_seconds()
            told = _told_of(each.body)
            is_held = told.is_held and ago < HELD_SECONDS
            seen = _Seen(
                at=monotonic - ago, said=told.said, open_polls=int(is_held), received_index=each.received_index
            )
            found[each.vm_key] = max(seen, found.get(each.vm_key, seen), key=_newer)
        self._elsewhere = found

    def tidy(self) -> None:
        """Pack the agents that are away, and forget those that have not asked for longer than any poll lasts.

        It is called now and then, from the thread of `begins` and `ends`.
        """
        now, here = self._clock.monotonic(), self._here()
        seen = {key: each for key, each in here.items() if each.open_polls > 0 or each.at >= now - _AWAY_SECONDS}
        self._away = _pack(
            {key: here[key] for key in here.keys() - seen.keys() if here[key].at >= now - FORGOTTEN_SECONDS}
        )
        self._seen = seen  # after the others are packed: whoever asks meanwhile finds an agent twice rather than never
        self._untold &= seen.keys()  # the rest was told long ago, or there is nobody to tell

    def _here(self) -> dict[str, _Seen]:
        """Return what is known of the agents that asked this process."""
        seen = self._seen  # before the packed ones, which `tidy` changes first
        return {**_unpack(self._away), **seen}

    def _shown_of(
        self, vm_keys: Iterable[str], here: dict[str, _Seen], elsewhere: dict[str, _Seen]
    ) -> dict[str, AgentSeen]:
        return {
            key: self._shown([each for each in (here.get(key), elsewhere.get(key)) if each is not None])
            for key in vm_keys
            if key in here or key in elsewhere
        }

    def _shown(self, known: list[_Seen]) -> AgentSeen:
        seen = max(known, key=_newer)
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
            received_index=max(each.received_index for each in known),
        )


def _newer(seen: _Seen) -> tuple[bool, float]:
    """Return by what the better of two is known: it holds a poll, or has heard of the agent later."""
    return seen.open_polls > 0, seen.at


@lru_cache(maxsize=64)  # most agents of a fleet say the same
def _read(header: str) -> _Said:
    """Return what *header* says; nothing, where it is none of the protocol's."""
    try:
        return _decode(header[:_LONGEST].encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _Said()
