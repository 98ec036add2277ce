"""Delays before the next attempt of a send or a poll. Pure: the random number generator is an argument.

The delays use full jitter (AWS Architecture Blog, "Exponential Backoff And Jitter"), so that the VMs of a fleet do not
return to a sink at the same time. Each delay has a minimum, because full jitter can return zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: No delay is shorter than this, unless its cap is.
MINIMUM_DELAY_SECONDS = 0.1

DELIVERY_BASE_SECONDS = 1.0
DELIVERY_CAP_SECONDS = 300.0
RETRY_AFTER_CAP_SECONDS = 3600.0
URGENT_CAP_SECONDS = 2.0
NOTICE_CAP_SECONDS = 15.0
#: The cap in the first `FIRST_SECONDS` of an outage, which is often only a restart of the destination.
FIRST_NOTICE_CAP_SECONDS = 5.0
FIRST_SECONDS = 60.0
POLL_CAP_SECONDS = 5.0

#: Too Many Requests, and Gone: "retry within 70 seconds" (Microsoft, "Azure Instance Metadata Service").
POLL_BACKOFF_STATUSES = frozenset({410, 429})

_MAX_EXPONENT = 64  # 2.0 ** 1024 overflows; every cap here is reached long before


def full_jitter(attempt: int, *, base_seconds: float, cap_seconds: float, random: Callable[[], float]) -> float:
    """Return a delay drawn evenly from zero to the window of *attempt*, at least 0.1 s (or *cap_seconds*, if less).

    The window is *base_seconds* at attempt 1 and doubles up to *cap_seconds*. *random* returns a number in [0, 1).
    """
    window = min(cap_seconds, base_seconds * 2.0 ** _exponent(attempt - 1))
    return max(min(MINIMUM_DELAY_SECONDS, cap_seconds), random() * window)


def delivery_cap(seconds_to_not_before: float | None, *, outage_seconds: float = math.inf) -> float:
    """Return the longest gap between two attempts for a record: 300 s, and less while NotBefore is in the future.

    Then the cap is a quarter of the time left, at least 1 s, at most 5 s in the first minute of an outage, and at most
    15 s after that. A Freeze or a Reboot has 15 minutes of notice.
    """
    if seconds_to_not_before is None or seconds_to_not_before <= 0:
        return DELIVERY_CAP_SECONDS
    longest = FIRST_NOTICE_CAP_SECONDS if outage_seconds < FIRST_SECONDS else NOTICE_CAP_SECONDS
    return min(longest, max(1.0, seconds_to_not_before / 4))


def delivery_gap(
    attempts: int,
    *,
    seconds_to_not_before: float | None = None,
    urgent: bool = False,
    retry_after: float | None = None,
    random: Callable[[], float],
    outage_seconds: float = math.inf,
) -> float:
    """Return the seconds until a record that failed *attempts* times is sent again; never less than 0.1 s.

    The gap is `full_jitter` with a window of 1 s at first and of `delivery_cap` at most. *retry_after* is a minimum of
    at most an hour and overrides the cap. For an *urgent* event, the gap is at most 2 s regardless of all other values.
    """
    cap = delivery_cap(seconds_to_not_before, outage_seconds=outage_seconds)
    gap = full_jitter(attempts, base_seconds=DELIVERY_BASE_SECONDS, cap_seconds=cap, random=random)
    if retry_after is not None:
        gap = max(gap, min(retry_after, RETRY_AFTER_CAP_SECONDS))
    return min(gap, URGENT_CAP_SECONDS) if urgent else gap


def poll_delay(interval_seconds: float, *, failures: int, status: int | None, retry_after: float | None) -> float:
    """Return the seconds until the next poll, after *failures* failed polls in a row.

    *status* is the status of the last response, or None without a response. After 429 and 410, the interval doubles
    with each failure, and *retry_after* is a minimum. The delay is at most 5 s (or the interval, if longer), because a
    spot eviction gives 30 s of notice. After any other failure, the next poll follows at the normal interval.
    """
    if status not in POLL_BACKOFF_STATUSES:
        return interval_seconds
    wanted = max(interval_seconds * 2.0 ** _exponent(failures), retry_after or 0.0)
    return max(interval_seconds, min(wanted, POLL_CAP_SECONDS))


def _exponent(count: int) -> int:
    return min(max(count, 0), _MAX_EXPONENT)
