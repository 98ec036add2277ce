"""Computes how long the agent waits before it retries a failed send or poll.

The delay after a failed send is random, so that the VMs in a fleet do not all retry at once. The algorithm is "full
jitter" with a minimum delay (AWS Architecture Blog, "Exponential Backoff And Jitter").
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
#: The cap in the first `FIRST_SECONDS` of an outage. A short outage is often a restart of the destination.
FIRST_NOTICE_CAP_SECONDS = 5.0
FIRST_SECONDS = 60.0
POLL_CAP_SECONDS = 5.0

#: Clients of IMDS must retry after these statuses (Microsoft, "Azure Instance Metadata Service").
POLL_BACKOFF_STATUSES = frozenset({410, 429})

_MAX_EXPONENT = 64  # 2.0 ** 1024 overflows


def full_jitter(attempt: int, *, base_seconds: float, cap_seconds: float, random: Callable[[], float]) -> float:
    """Return a random delay between zero and the window of *attempt*, but at least 0.1 s.

    The window starts at *base_seconds* and doubles with each attempt, up to *cap_seconds*. If *cap_seconds* is less
    than 0.1 s, the function always returns *cap_seconds*. *random* returns a number in [0, 1).
    """
    window = min(cap_seconds, base_seconds * 2.0 ** _exponent(attempt - 1))
    return max(min(MINIMUM_DELAY_SECONDS, cap_seconds), random() * window)


def delivery_cap(seconds_to_not_before: float | None, *, outage_seconds: float = math.inf) -> float:
    """Return the maximum delay between two attempts. It gets shorter as NotBefore approaches.

    Before NotBefore, the maximum is a quarter of the remaining time, but at least 1 s and at most 15 s. In the first
    minute of an outage, it is at most 5 s. The limits are short, because Azure announces a Freeze or a Reboot only 15
    minutes in advance. If NotBefore has passed or is unknown, the maximum is 300 s.
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

    The delay is random. Its upper limit starts at 1 s and doubles with each attempt, up to `delivery_cap`. The delay is
    at least *retry_after*, or one hour if *retry_after* is longer. If *urgent* is true, the delay never exceeds 2 s,
    even if *retry_after* is longer.
    """
    cap = delivery_cap(seconds_to_not_before, outage_seconds=outage_seconds)
    gap = full_jitter(attempts, base_seconds=DELIVERY_BASE_SECONDS, cap_seconds=cap, random=random)
    if retry_after is not None:
        gap = max(gap, min(retry_after, RETRY_AFTER_CAP_SECONDS))
    return min(gap, URGENT_CAP_SECONDS) if urgent else gap


def poll_delay(interval_seconds: float, *, failures: int, status: int | None, retry_after: float | None) -> float:
    """Return the delay before the next poll after *failures* failed polls in a row.

    *status* is the status of the last response, or None if no response arrived. After status 429 or 410, the delay
    doubles with each failure, and *retry_after* sets a minimum. After any other failure, the poll interval applies. The
    maximum is 5 s or the poll interval, whichever is longer, because Azure announces the eviction of a spot VM only 30
    s in advance.
    """
    if status not in POLL_BACKOFF_STATUSES:
        return interval_seconds
    wanted = max(interval_seconds * 2.0 ** _exponent(failures), retry_after or 0.0)
    return max(interval_seconds, min(wanted, POLL_CAP_SECONDS))


def _exponent(count: int) -> int:
    return min(max(count, 0), _MAX_EXPONENT)
