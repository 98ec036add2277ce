"""Decides whether load balancers should send traffic to this VM (the page /serving).

An event takes the VM out of service *before_seconds* before NotBefore, or when it starts. The VM then stays out until
every event that took it out has ended, even if Azure changes the type of an event. If nothing proves how an event
ended, the VM stays out for *after_seconds* more. The outbox stores these events, so that a restart of the agent does
not change the response.

While IMDS does not respond, the response of /serving stays the same for up to one hour. After that, /serving reports
the VM as in service, so that an outage of IMDS does not keep the VM out permanently.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from bridge.clock import REAL_CLOCK, Clock
from bridge.config.settings import ServingSettings
from bridge.events.event import ScheduledEvent, names_vm
from bridge.events.record import Evidence, TransitionRecord
from bridge.events.transitions import is_over
from bridge.health.readiness import ImdsState
from bridge.health.server import Response
from bridge.logs import ThrottledLog
from bridge.outbox.outbox import Outbox

logger = logging.getLogger(__name__)

LONGEST_SILENCE_SECONDS = 3600.0
_STATE_KEY = "out_of_service"
_PROOF = frozenset({Evidence.OBSERVED, Evidence.BOOT_ID})
_IN_SERVICE = "No event takes this VM out of service."


class Serving:
    """Responds to /serving. All methods are thread-safe and return immediately."""

    def __init__(
        self,
        outbox: Outbox,
        imds: ImdsState,
        *,
        settings: ServingSettings,
        vm_name: Callable[[], str | None],
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._outbox = outbox
        self._imds = imds
        self._settings = settings
        self._vm_name = vm_name
        self._clock = clock
        self._started_at = clock.monotonic()
        self._lock = threading.Lock()
        self._log = ThrottledLog(logger)

    def page(self) -> Response:
        """Return status 200 while the VM should receive traffic, and otherwise 503 with a reason."""
        reason = self.out_of_service_reason()
        return Response(
            status=200 if reason is None else 503,
            content_type="text/plain; charset=utf-8",
            body=f"{reason or _IN_SERVICE}\n".encode("ascii", "backslashreplace"),
        )

    def observe(self, records: Sequence[TransitionRecord]) -> None:
        """Update the list of events that keep the VM out of service.

        If a record proves that an event has ended, the event no longer keeps the VM out of service. If a record reports
        the end without proof, the VM stays out of service for another `serving.after_seconds`.
        """
        with self._lock:
            out = self._read()
            for record in records:
                if record.transition.is_ending and record.event_key in out:
                    if record.evidence in _PROOF:
                        del out[record.event_key]
                    else:
                        out[record.event_key] = self._ends_at()
            self._write(out)

    def out_of_service_reason(self) -> str | None:
        """Return the reason why the VM is out of service, or None if it is in service."""
        with self._lock:
            out, document = self._read(), self._imds.document
            active = {} if document is None else {each.key: each for each in document.events if not is_over(each)}
            if not self._is_silent:
                for event in active.values():
                    if event.key not in out and self._takes_out(event):
                        out[event.key] = None
                if document is not None:
                    self._note_ends(out, active)
            self._write(out)
            if out and self._is_given_up([active.get(key) for key in out]):
                message = "IMDS was silent for an hour after an event was due. The VM returns to service. Check IMDS."
                self._log.problem("silence", logging.ERROR, message)
                return None
            self._log.recovered("silence", "IMDS responds again. Its events decide whether the VM is in service.")
            return self._reason(*next(iter(out.items())), active) if out else None

    def _note_ends(self, out: dict[str, float | None], active: dict[str, ScheduledEvent]) -> None:
        now = self._clock.timestamp()
        for key, ends_at in list(out.items()):
            if key in active:
                out[key] = None
            elif ends_at is None:  # the agent stopped before it processed the ending
                out[key] = self._ends_at()
            elif now >= ends_at:
                del out[key]

    @property
    def _silent_seconds(self) -> float:
        silent = self._imds.silent_seconds
        return self._clock.monotonic() - self._started_at if silent is None else silent

    @property
    def _is_silent(self) -> bool:
        return self._imds.silent_seconds is None or self._silent_seconds > self._imds.gap_seconds

    def _is_given_up(self, events: Sequence[ScheduledEvent | None]) -> bool:
        due = self._clock.now() - timedelta(seconds=LONGEST_SILENCE_SECONDS)
        is_due = all(
            each is None or each.event_status != "Scheduled" or each.not_before is None or each.not_before <= due
            for each in events
        )
        return is_due and self._silent_seconds >= LONGEST_SILENCE_SECONDS

    def _takes_out(self, event: ScheduledEvent) -> bool:
        settings, name = self._settings, self._vm_name()
        if event.event_type not in settings.event_types or not event.resources or names_vm(event, name) is False:
            return False
        if event.duration_seconds is not None and event.duration_seconds < settings.min_duration_seconds:
            return False
        if event.event_status != "Scheduled" or event.not_before is None:
            return True
        return (event.not_before - self._clock.now()).total_seconds() <= settings.before_seconds

    def _ends_at(self) -> float:
        return self._clock.timestamp() + self._settings.after_seconds

    def _reason(self, key: str, ends_at: float | None, active: dict[str, ScheduledEvent]) -> str:
        event = active.get(key)
        if event is not None:
            return f"{event.event_type} {key} is {event.event_status}."
        if ends_at is None:
            return f"Event {key} has no confirmed ending."
        return f"Event {key} ended without proof. The VM returns in {max(ends_at - self._clock.timestamp(), 0):.0f} s."

    def _read(self) -> dict[str, float | None]:
        stored = self._outbox.read(lambda state: state.get(_STATE_KEY))
        return {} if stored is None else json.loads(stored)

    def _write(self, out: dict[str, float | None]) -> None:
        value = json.dumps(out) if out else None
        if value == self._outbox.read(lambda state: state.get(_STATE_KEY)):
            return
        self._outbox.change(lambda state: state.put(_STATE_KEY, value))
        logger.info("/serving: %s", f"{len(out)} events take this VM out of service." if out else _IN_SERVICE)
