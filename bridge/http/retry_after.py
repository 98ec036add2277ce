"""Parses the Retry-After header of an HTTP response.

This module does not limit the value. For a sink, the value is the minimum delay of the whole sink, up to one hour. It
does not apply to Preempt and Terminate records, which the agent retries after at most 2 s
(`bridge.delivery.retry_schedule` and `bridge.backoff.delivery_gap`). `bridge.backoff.poll_delay` limits the delay of
the IMDS poll to 5 s or the poll interval, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from email.message import Message
from email.utils import parsedate_to_datetime


def retry_after_seconds(headers: Mapping[str, str] | Message, *, now: datetime | None = None) -> float | None:
    """Return the Retry-After header in seconds, or None if it is missing or invalid.

    The header contains a number of seconds or an HTTP date (RFC 9110 section 10.2.3). A past date counts as 0.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:18])
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - (now or datetime.now(timezone.utc))).total_seconds())
