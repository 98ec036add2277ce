"""The delays before the next attempt of a send or a poll: the retry delay.

The functions are pure, so the random number generator is an argument. The delays use full jitter (AWS Architecture
Blog, "Exponential Backoff And Jitter"), because the VMs of a fleet must not all retry at the same moment. Full jitter
can return zero, so each delay has a minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MINIMUM_DELAY_SECONDS = 0.1

DELIVERY_BASE_SECONDS = 1.0
DELIVERY_CAP_SECONDS = 300.0
RETRY_AFTER_CAP_SECONDS = 3600.0
URGENT_CAP_SECONDS = 2.0
NOTICE_CAP_SECONDS = 15.0
#: Applies in the first `FIRST_SECONDS` of an outage, because a short outage is often a restart of the destination.
FIRST_NOTICE_CAP_SECONDS = 5.0
FIRST_SECONDS = 60.0
POLL_CAP_SECONDS = 5.0

#: IMDS asks clients to retry after these statuses (Microsoft, "Azure Instance Metadata Service").
POLL_BACKOFF_STATUSES = frozenset({410, 429})

_MAX_EXPONENT = 64  # 2.0 ** 1024 overflows; every cap here is reached long before


def full_jitter(attempt: int, *, base_seconds: float, cap_seconds: float, random: Callable[[], float]) -> float:
    """Return a random delay between zero and the window of *attempt*, but at least 0.1 s.

    The window is *base_seconds* for attempt 1 and doubles with each attempt, up to *cap_seconds*. The minimum delay is
    *cap_seconds* if *cap_seconds* is less than 0.1 s. *random* returns a number in [0, 1).
    """
    window = min(cap_seconds, base_seconds * 2.0 ** _exponent(attempt - 1))
    return max(min(MINIMUM_DELAY_SECONDS, cap_seconds), random() * window)


def delivery_cap(seconds_to_not_before: float | None, *, outage_seconds: float = math.inf) -> float:
    """Return the longest delay between two attempts for a record. The delay is shorter before NotBefore.

    The delay is at most 300 s. While NotBefore is in the future, the delay is at most a quarter of the time left, but
    at least 1 s. It is also at most 5 s in the first minute of an outage, and at most 15 s after the first minute,
    because Azure announces a Freeze or a Reboot only 15 minutes in advance.
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
    """Return the delay before the next attempt for a record that failed *attempts* times.

    The delay is `full_jitter` with a window that starts at 1 s and ends at `delivery_cap`. *retry_after* is a minimum
    of at most one hour and overrides the cap. If *urgent* is true, the delay is at most 2 s, regardless of all other
    values.
    """
    cap = delivery_cap(seconds_to_not_before, outage_seconds=outage_seconds)
    gap = full_jitter(attempts, base_seconds=DELIVERY_BASE_SECONDS, cap_seconds=cap, random=random)
    if retry_after is not None:
        gap = max(gap, min(retry_after, RETRY_AFTER_CAP_SECONDS))
    return min(gap, URGENT_CAP_SECONDS) if urgent else gap


def poll_delay(interval_seconds: float, *, failures: int, status: int | None, retry_after: float | None) -> float:
    """Return the delay before the next poll after *failures* failed polls in a row.

    *status* is the status of the last response, or None without a response. After status 429 or 410, the delay doubles
    with each failure, and *retry_after* is a minimum. The delay is at most 5 s or the poll interval, whichever is
    longer, because Azure announces the eviction of a spot VM only 30 s in advance. After any other failure, the poll
    interval does not change.
    """
    if status not in POLL_BACKOFF_STATUSES:
        return interval_seconds
    wanted = max(interval_seconds * 2.0 ** _exponent(failures), retry_after or 0.0)
    return max(interval_seconds, min(wanted, POLL_CAP_SECONDS))


def _exponent(count: int) -> int:
    return min(max(count, 0), _MAX_EXPONENT)
