"""Reads tables of keys that people wrote, TOML or JSON, and collects every mistake instead of stopping at the first.

Scenario files and the control endpoint describe events and faults with the same keys, so they share this reader.
It is the simulator's own: the agent's configuration parser stands on the other side of the wire.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from bridge.errors import BridgeError
from bridge.text import nearest

_SHOWN_CHARACTERS = 80
_MAX_NUMBER = 1e9
_Default = TypeVar("_Default")


class SimulatorError(BridgeError):
    """The simulator cannot do what was asked of it."""


class WrongRequest(SimulatorError):
    """What was asked of the simulator does not make sense; the message lists every mistake, one a line."""


class Table:
    """One table of keys; each getter notes a mistake and returns the default when the value is wrong."""

    def __init__(self, values: Mapping[str, Any], *, where: str, mistakes: list[str]) -> None:
        self._values = values
        self._where = where
        self._known: set[str] = set()
        self.mistakes = mistakes

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """Return the value of *key* as it came; null when absent."""
        self._known.add(key)
        return self._values.get(key)

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return default if value is None else value
        return self._wrong(key, value, "a text", default)

    def number(self, key: str, default: float, *, minimum: float = 0.0, or_never: bool = False) -> float:
        """Return a number of at least *minimum* and at most thirty years of seconds; *or_never* also allows inf."""
        value = self.get(key)
        if value is None:
            return default
        if or_never and value == math.inf:
            return math.inf
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= _MAX_NUMBER:
            return self._wrong(key, value, f"a number from {minimum:g} to {_MAX_NUMBER:g}", default)
        return float(value)

    def whole(self, key: str, default: int, *, minimum: int = 0, maximum: int | None = None) -> int:
        """Return a whole number from *minimum* to *maximum*."""
        value = self.get(key)
        if value is None:
            return default
        too_big = maximum is not None and isinstance(value, int) and value > maximum
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum or too_big:
            limits = f"from {minimum} to {maximum}" if maximum is not None else f"not below {minimum}"
            return self._wrong(key, value, f"a whole number {limits}", default)
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of texts; null when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return self._wrong(key, value, "a list of texts", None)
        return tuple(value)

    def choice(self, key: str, default: str, options: Collection[str]) -> str:
        """Return one of *options*."""
        value = self.text(key, default)
        if value != default and value not in options:
            self.say(f"{key} = {shown(value)} is not known.{nearest(value, options)} {one_of(options)}")
            return default
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a table; {} when absent."""
        value = self.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        return self._wrong(key, value, "a table", {})

    def say(self, mistake: str) -> None:
        """Note *mistake*, with the place of this table before it."""
        self.mistakes.append(f"{self._where}: {mistake}")

    def refuse_unknown(self) -> None:
        """Note every key that nothing has asked for."""
        for key in self._values:
            if key not in self._known:
                self.say(f"no key is called {shown(key)}.{nearest(key, self._known)} {one_of(self._known)}")

    def _wrong(self, key: str, value: object, wanted: str, default: _Default) -> _Default:
        self.say(f"{key} = {shown(value)} must be {wanted}.")
        return default


def shown(value: object) -> str:
    """Return *value* for a message, cut to a length that a person reads."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def one_of(options: Collection[str]) -> str:
    """Return a sentence that lists *options*."""
    return f"Known: {', '.join(sorted(options))}."
