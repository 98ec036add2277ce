"""Builds the `impact` of an event from the interruptions that the sampler has measured."""

from __future__ import annotations

from datetime import datetime, timezone

from bridge.clock import format_time
from bridge.events.record import Impact, Pause
from bridge.impact.judgement import Verdict
from bridge.impact.sampler import KEPT_SECONDS, Interruption, Sampler

#: A pause can begin before the document shows the event as Started.
_EARLY_SECONDS = 10.0
_COMPLETE = 0.99
_NEVER_STARTED = "The document never showed the event as Started, so the impact covers at most the last ten minutes."
_PARTLY_SAMPLED = "The agent sampled only a part of the event."


def impact_of(sampler: Sampler, *, started_at: float | None, ended_at: float) -> Impact:
    """Return the impact of an event from *started_at* to *ended_at* (Unix seconds)."""
    since = ended_at - KEPT_SECONDS if started_at is None else started_at - _EARLY_SECONDS
    found = sampler.interruptions(since=since)
    stalled = sum(each.late_seconds for each in found if each.verdict is Verdict.STALLED)
    pauses = tuple(_pause(each) for each in found if each.verdict is not Verdict.STALLED)
    lengths = [pause.seconds for pause in pauses if pause.seconds is not None]
    coverage = _coverage(started_at, ended_at, sampler.began_at, stalled)
    reasons = [pause.reason for pause in pauses if pause.reason is not None]
    if coverage is None:
        reasons.append(_NEVER_STARTED)
    elif coverage < _COMPLETE:
        reasons.append(_PARTLY_SAMPLED)
    is_known = bool(lengths) or not reasons
    return Impact(
        pauses=pauses,
        longest_seconds=max(lengths, default=0.0) if is_known else None,
        total_seconds=round(sum(lengths), 3) if is_known and len(lengths) == len(pauses) else None,
        resolution_seconds=round(
            max((each.resolution_seconds for each in found), default=sampler.resolution_seconds), 3
        ),
        coverage=coverage,
        agent_stalled_seconds=round(stalled, 3),
        reason=reasons[0] if reasons else None,
    )


def _pause(found: Interruption) -> Pause:
    seconds = None if found.verdict is Verdict.UNDECIDED else round(found.late_seconds + found.step_seconds, 3)
    return Pause(
        at=format_time(datetime.fromtimestamp(found.began_at, timezone.utc)),
        seconds=seconds,
        late_seconds=round(found.late_seconds, 3),
        step_seconds=round(found.step_seconds, 3),
        source=found.source,
        reason=found.reason,
    )


def _coverage(started_at: float | None, ended_at: float, sampled_since: float, stalled: float) -> float | None:
    if started_at is None:
        return None
    length = ended_at - started_at
    if length <= 0:
        return 1.0 if sampled_since <= started_at else 0.0
    sampled = ended_at - max(started_at, sampled_since) - stalled
    return round(min(max(sampled / length, 0.0), 1.0), 3)
