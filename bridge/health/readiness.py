"""What /readyz answers: its body, and what makes an agent not ready.

The agent writes this body (`bridge.health.reporter` fills it in), and `status` reads it from a running agent
(`bridge.health.client`).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from bridge.outbox.deliveries import SinkAccount

#: A sink whose oldest record has waited for longer is stuck, whatever the reason.
STUCK_SECONDS = 300.0


def directory_text(directory: Path) -> str:
    """Return the path of *directory*, as `Readiness.state_directory` has it: whole, and UTF-8 whatever its bytes."""
    return os.fsencode(directory.absolute()).decode("utf-8", "replace")


class SinkReadiness(SinkAccount, frozen=True, kw_only=True):
    """One sink: its account across restarts, how long its oldest record waits, and whether a person must act."""

    oldest_pending_seconds: float
    needs_attention: bool


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """The body of the answer, ready or not; members that a later version adds are ignored."""

    status: str
    """``ready`` or ``not_ready``."""
    reasons: tuple[str, ...]
    """Why not, a sentence each."""
    version: str
    stream_id: str | None
    state_directory: str
    state_in_memory: bool
    state_loading: bool = False
    """True while the outbox of `state_directory` is being loaded, and `stream_id` is that of one in its place."""
    vm: str | None
    imds: str
    configuration: str | None = None
    """The file that is in force; "" for none, so the defaults. None: an older agent does not say."""
    last_good_poll_at: str | None
    last_good_poll_seconds_ago: float | None
    oldest_pending_seconds: float = 0.0
    sinks: dict[str, SinkReadiness]

    def is_about(self, directory: Path) -> bool:
        """Return whether *directory* is the agent's state directory."""
        return self.state_directory == directory_text(directory)

    @property
    def is_ready(self) -> bool:
        """Return whether the agent sees what happens, and every sink takes it."""
        return self.status == "ready"


def why_polling_is_not_ready(
    silent_seconds: float | None, *, gap_seconds: float, refused_answer: str | None = None
) -> list[str]:
    """Return a sentence when IMDS gave no good answer for longer than *gap_seconds*, or never (None).

    *refused_answer* says why the last one is no document; None when it is not known to be that.
    """
    if silent_seconds is None:
        return [
            "IMDS has not answered yet." if refused_answer is None else f"IMDS gave no good answer: {refused_answer}"
        ]
    if silent_seconds <= gap_seconds:
        return []
    if refused_answer is None:
        return [f"IMDS answered last {silent_seconds:.0f} s ago."]
    return [f"IMDS gave its last good answer {silent_seconds:.0f} s ago: {refused_answer}"]


def why_sink_is_not_ready(name: str, sink: SinkReadiness) -> list[str]:
    """Return a sentence for each reason why the sink called *name* does not take what it should."""
    reasons = []
    if sink.needs_attention:
        reasons.append(f"Sink {name} needs a person; `status` shows its last error.")
    if sink.oldest_pending_seconds > STUCK_SECONDS:
        reasons.append(f"Sink {name} is stuck: its oldest record has waited {sink.oldest_pending_seconds:.0f} s.")
    return reasons
