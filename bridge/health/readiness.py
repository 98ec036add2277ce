"""Defines the /readyz response and the conditions for readiness."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Protocol

import msgspec

from bridge.events.event import Document

#: A sink is stuck if its oldest pending record is older than this.
STUCK_SECONDS = 300.0


class ImdsState(Protocol):
    """The attributes of `bridge.polling.poller.Poller` that the pages use."""

    good_at: datetime | None
    refused_answer: str | None
    """The error in the last response, or None if IMDS did not respond."""

    @property
    def silent_seconds(self) -> float | None:
        """Return the seconds since the last good response, or None before the first good response."""

    @property
    def gap_seconds(self) -> float:
        """Return the longest time without a good response that does not count as silence."""

    @property
    def document(self) -> Document | None:
        """Return the tracked document, or None while it is unknown."""


def directory_text(directory: Path) -> str:
    """Return the absolute path of *directory* as valid UTF-8 text."""
    return os.fsencode(directory.absolute()).decode("utf-8", "replace")


class SinkReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """A sink's record counts, the age of its oldest record, and whether it needs attention."""

    accepted: int
    delivered: int
    pending: int
    parked: int
    expired: int
    evicted: int
    discarded: int
    oldest_pending_seconds: float
    needs_attention: bool | None
    """Null if no agent runs."""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /readyz. Clients must ignore unknown members of later versions."""

    status: str
    """``ready`` or ``not_ready``."""
    reasons: tuple[str, ...]
    """One sentence for each reason why the agent is not ready."""
    version: str
    stream_id: str | None
    state_directory: str
    outbox_behind: str | None
    """The reason why the outbox is not saved, or null if it is saved."""
    outbox_behind_seconds: float
    vm: str | None
    imds: str
    configuration: str
    """The path of the configuration file, or "" for the defaults."""
    configuration_rejected: bool = False
    """Whether the file was invalid at the last reload. The agent continues with the earlier configuration."""
    last_good_poll_at: str | None
    last_good_poll_seconds_ago: float | None
    oldest_pending_seconds: float = 0.0
    sinks: dict[str, SinkReadiness]


def why_polling_is_not_ready(imds: ImdsState) -> list[str]:
    """Return a sentence if the last good response is too old, or if there was none yet."""
    silent_seconds, refused = imds.silent_seconds, imds.refused_answer
    if silent_seconds is None:
        return ["IMDS has not responded yet." if refused is None else f"IMDS returned no document: {refused}"]
    if silent_seconds <= imds.gap_seconds:
        return []
    if refused is None:
        return [f"The last response from IMDS was {silent_seconds:.0f} s ago."]
    return [f"The last good response from IMDS was {silent_seconds:.0f} s ago: {refused}"]


def why_sink_is_not_ready(name: str, sink: SinkReadiness) -> list[str]:
    """Return one sentence for each problem of the sink *name*."""
    reasons = []
    if sink.needs_attention:
        reasons.append(f"Sink {name} needs attention. `status` shows its last error.")
    if sink.oldest_pending_seconds > STUCK_SECONDS:
        reasons.append(f"Sink {name} is stuck: its oldest record has waited {sink.oldest_pending_seconds:.0f} s.")
    return reasons
