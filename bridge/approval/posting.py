"""Telling Azure: one StartRequests for all that is due, and what its answer means.

An attempt is counted in the outbox before it is made, so that after a crash it is known that Azure may have been told.
Posting the same EventId again does no harm there: a 200 means that the event is approved, not who did it.

    200                 approved, once
    another status      failed, told once at first; tried again until the event starts, changes or is held
    no answer           unknown, which is neither: tried again once a newer document shows the event still waiting

One EventId that Azure does not know refuses a whole request, so after a 4xx each is posted by itself. While a request
is on its way, and until its outcome was handed to the outbox, the poll can ask to wait (`wait_for`): `approved` comes
before the `started` that it caused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from bridge.backoff import delivery_gap
from bridge.errors import ImdsError, ImdsStatus
from bridge.events.event import Incarnation
from bridge.outbox.approvals import POSTED, PendingApproval

_TOO_MANY_REQUESTS = 429
_LONGEST_GAP_SECONDS = 30.0
_MOST_IN_A_REQUEST = 50


class Imds(Protocol):
    """What is needed of the metadata service."""

    def start_requests(self, event_ids: Sequence[str], *, incarnation: Incarnation) -> int:
        """Approve events; raise ImdsError."""


class Posted(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt came to; *consent* as it is to be written."""

    consent: PendingApproval
    error: ImdsError | None = None
    is_news: bool = True
    """A failure that no record has told yet."""

    @property
    def is_accepted(self) -> bool:
        """Return whether Azure took it."""
        return self.error is None


class Poster:
    """Posts approvals with *imds* and remembers when each may be tried again; for one thread but for `wait_for`."""

    def __init__(
        self,
        imds: Imds,
        *,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._imds = imds
        self._now = now
        self._monotonic = monotonic
        self._chance = chance
        self._next: dict[tuple[str, str], float] = {}
        self._tried: dict[tuple[str, str], float] = {}
        self._quiet = threading.Condition()
        self._in_flight: frozenset[str] = frozenset()

    def due_at(self, consent: PendingApproval) -> float:
        """Return when *consent* may be posted, on the monotonic clock."""
        return self._next.get(consent.key, float("-inf"))

    def is_checked(self, consent: PendingApproval, answer_at: float) -> bool:
        """Return whether the document of *answer_at* is newer than the last attempt."""
        return answer_at > self._tried.get(consent.key, float("-inf"))

    def put_off(self, consent: PendingApproval, seconds: float) -> None:
        """Do not post *consent* for so long."""
        self._next[consent.key] = self._monotonic() + seconds

    def forget(self, keys: Collection[tuple[str, str]]) -> None:
        """Forget all but *keys*."""
        for known in (self._next, self._tried):
            for key in known.keys() - set(keys):
                del known[key]

    # The order of records.

    def takes_off(self, consents: Sequence[PendingApproval]) -> None:
        """Say that these may be posted from now on."""
        with self._quiet:
            self._in_flight = frozenset(consent.event_id for consent in consents)

    def has_landed(self) -> None:
        """Say that the outcome of what took off was handed to the outbox."""
        with self._quiet:
            self._in_flight = frozenset()
            self._quiet.notify_all()

    @property
    def in_flight(self) -> frozenset[str]:
        """The keys of the events that Azure may be told about just now."""
        return self._in_flight

    def wait_for(self, event_keys: Collection[str], timeout_seconds: float) -> None:
        """Wait until no request about *event_keys* is on its way, at most *timeout_seconds*."""
        if not self._in_flight:
            return
        with self._quiet:
            self._quiet.wait_for(lambda: self._in_flight.isdisjoint(event_keys), timeout_seconds)

    # The request.

    def post(self, consents: Sequence[PendingApproval], incarnation: Incarnation) -> list[Posted]:
        """Post *consents*, in one request if possible, and return what became of each."""
        done: list[Posted] = []
        for start in range(0, len(consents), _MOST_IN_A_REQUEST):
            done += self._post(consents[start : start + _MOST_IN_A_REQUEST], incarnation)
        return done

    def _post(self, consents: Sequence[PendingApproval], incarnation: Incarnation) -> list[Posted]:
        try:
            status = self._imds.start_requests([consent.event_id for consent in consents], incarnation=incarnation)
        except ImdsStatus as error:
            about_one_of_them = 400 <= error.status < 500 and error.status != _TOO_MANY_REQUESTS  # noqa: PLR2004
            if about_one_of_them and len(consents) > 1:
                return [posted for consent in consents for posted in self._post([consent], incarnation)]
            return [self._failed(consent, error, error.status, error.retry_after_seconds) for consent in consents]
        except ImdsError as error:
            return [self._failed(consent, error, None, None) for consent in consents]
        moment = self._now().timestamp()
        return [
            Posted(
                consent=msgspec.structs.replace(
                    consent, state=POSTED, http_status=status, posted_at=moment, changed_at=moment
                )
            )
            for consent in consents
        ]

    def _failed(
        self, consent: PendingApproval, error: ImdsError, status: int | None, retry_after: float | None
    ) -> Posted:
        now = self._now()
        not_before = consent.event.not_before
        gap = delivery_gap(
            consent.attempts,
            seconds_to_not_before=None if not_before is None else (not_before - now).total_seconds(),
            urgent=consent.event.is_urgent,
            retry_after=retry_after,
            random=self._chance,
        )
        if retry_after is None:
            gap = min(gap, _LONGEST_GAP_SECONDS)
        self.put_off(consent, gap)
        self._tried[consent.key] = self._monotonic()
        failed = msgspec.structs.replace(
            consent, http_status=status, is_told=consent.is_told or status is not None, changed_at=now.timestamp()
        )
        return Posted(consent=failed, error=error, is_news=failed.is_told and not consent.is_told)
