"""Compares a dashboard before and after a round trip through Grafana's types."""

from __future__ import annotations

from collections.abc import Iterator


def lost(before: object, after: object, path: str = "") -> Iterator[str]:
    """Yield the paths of *before* that are missing or different in *after*. *after* can have additional defaults."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif before != after:
        yield path
