"""Stands in for pywin32's module of this name: an event log with configurable failures that keeps its events.

Insert the folder at the front of `sys.path`. The calls follow the Windows documentation (winbase.h).
"""

from __future__ import annotations

import threading
from typing import Any

import pywintypes  # type: ignore[import-untyped,unused-ignore]  # the one beside this file, not Windows' own

events: list[dict[str, Any]] = []
open_handles: set[int] = set()
refusal: list[tuple[int, str]] = []
"""The error that every report raises, if any."""
may_answer = threading.Event()
may_answer.set()
_MOST_CHARACTERS = 31_839


def RegisterEventSource(server: str | None, source: str) -> int:  # noqa: N802  # its name there
    """Return a handle."""
    assert server is None
    assert source
    handle = len(events) + 1_000
    open_handles.add(handle)
    return handle


def DeregisterEventSource(handle: int) -> None:  # noqa: N802  # likewise
    """Close *handle*."""
    open_handles.remove(handle)


def ReportEvent(  # noqa: N802, PLR0917  # likewise
    handle: int, kind: int, category: int, event_id: int, sid: object, strings: list[str], data: object
) -> None:
    """Store one event."""
    assert handle in open_handles
    may_answer.wait()
    if refusal:
        number, words = refusal[0]
        raise pywintypes.error(number, "ReportEvent", words)
    assert all(len(each) <= _MOST_CHARACTERS for each in strings)
    events.append({"kind": kind, "category": category, "id": event_id, "sid": sid, "strings": strings, "data": data})
