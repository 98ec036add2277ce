"""The body of /readyz, as the agent writes it and as `status` reads it."""

from __future__ import annotations

import msgspec

from bridge.outbox.deliveries import SinkAccount

#: A sink whose oldest record has waited for longer is stuck, whatever the reason.
STUCK_SECONDS = 300.0


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
    vm: str | None
    imds: str
    last_good_poll_at: str | None
    last_good_poll_seconds_ago: float | None
    oldest_pending_seconds: float = 0.0
    sinks: dict[str, SinkReadiness]

    @property
    def is_ready(self) -> bool:
        """Return whether the agent sees what happens, and every sink takes it."""
        return self.status == "ready"
