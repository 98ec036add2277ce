"""The sink contract: `Sink`, `SinkConfig` and everything else that a sink author imports.

The host calls a sink from one thread only, except `close`, which may come from another while a `send` is cut.

- The constructor gets its ``Config`` and must be quick: connect on demand.
- ``send(batch)`` puts one request on the wire. Returning means that every record was accepted, durably as far as the
  destination can say. Raise `DeliveryFailed` when nothing was accepted for now, `DeliveryRejected` when records were
  refused for good. Anything else raised counts as DeliveryFailed.
- A sink never sleeps, retries, filters, counts or logs an outcome, and knows no outbox: all that is done once, by the
  host, for every sink alike.
- Keep within ``config.timeout_seconds``, wall clock. The host cuts what does not: it calls ``close`` and builds a new
  instance before it tries again.
- The records of one EventId come in order. Delivery is at least once: after a crash, a record comes again with the same
  ``id``. The host also sends the newest record of an active event again to a sink that requests this
  (`Sink.refresh_seconds`).

Beside the contract this module hands on what sinks have in common: a session with a deadline, secrets, tokens,
programs, and texts for people. So a sink imports nothing else of the agent, whose own modules may move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec
import requests

from bridge.clock import format_time, parse_time, utc_now
from bridge.errors import (
    BridgeError,
    CredentialFailed,
    DeadlineExceeded,
    DeliveryError,
    DeliveryFailed,
    DeliveryRejected,
    RetryReason,
    SecretUnavailable,
)
from bridge.events.environment import ENVIRONMENT_PREFIX, environment_of
from bridge.events.event import URGENT_EVENT_TYPES, ScheduledEvent, VmIdentity, encode
from bridge.events.record import Evidence, Transition, TransitionRecord
from bridge.http.failures import causes, is_loopback, root_cause
from bridge.http.session import (
    DeadlineSession,
    ResponseEncoded,
    ResponseTooLarge,
    ResponseUnread,
    retry_after_seconds,
)
from bridge.http.tls_files import tls_file_problems
from bridge.system.access_tokens import AccessToken, RenewedToken, fetch_token, token_of
from bridge.system.extras import how_to_install
from bridge.system.run_and_kill import PASSING_ERRORS, Ending, Finished, Runner, find_program
from bridge.system.scopes import check_scope
from bridge.system.secrets import Secret, masked
from bridge.system.threads import run_daemon
from bridge.text import duration, escaped, excerpt, one_line

__all__ = [
    "ENVIRONMENT_PREFIX",
    "PASSING_ERRORS",
    "URGENT_EVENT_TYPES",
    "AccessToken",
    "AttestedTokens",
    "BridgeError",
    "CredentialFailed",
    "DeadlineExceeded",
    "DeadlineSession",
    "DeliveryError",
    "DeliveryFailed",
    "DeliveryRejected",
    "Ending",
    "Evidence",
    "Finished",
    "RenewedToken",
    "ResponseEncoded",
    "ResponseTooLarge",
    "ResponseUnread",
    "RetryReason",
    "Runner",
    "ScheduledEvent",
    "Secret",
    "SecretUnavailable",
    "Sink",
    "SinkConfig",
    "Transition",
    "TransitionRecord",
    "VmIdentity",
    "causes",
    "check_scope",
    "duration",
    "encode",
    "environment_of",
    "escaped",
    "excerpt",
    "fetch_token",
    "find_program",
    "format_time",
    "how_to_install",
    "is_loopback",
    "masked",
    "one_line",
    "parse_time",
    "retry_after_seconds",
    "root_cause",
    "run_daemon",
    "tls_file_problems",
    "token_of",
    "utc_now",
]


class AttestedTokens(Protocol):
    """How the host makes the token of a portal that asks Azure which VM this is (PROTOCOL.md, section 2)."""

    def __call__(self, post: Callable[[str, bytes], requests.Response], *, portal: str) -> RenewedToken:
        """Return the token; nothing is asked for before its `current` is called.

        *post* posts a body of JSON to a path below the portal's URL and returns the answer, whatever its status, or
        raises a BridgeError; it is called from another thread. Messages call the portal *portal*.
        """


class SinkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that every ``[[sinks]]`` table has; a sink's own Config adds its keys to these."""

    name: str = ""
    """What logs, metrics and the outbox call this sink. Default: its type. A new name is a new sink."""
    scope: Literal["mine", "all"] = "mine"
    """mine: events that name this VM, or no VM; all events while this VM's name is unknown. all: every event."""
    speak: Literal["each", "first"] = "each"
    """each: every VM that an event names tells of it. first: only the first VM in Resources does, for chat and mail:
    one message a transition, not one a VM. What became of an approval is told by the VM that gave it. The first VM's
    agent must run: if it does not, nobody else tells, so keep a sink with `each` for alerts and logs."""
    transitions: tuple[str, ...] | None = None
    """Send only these transitions. Default: all."""
    event_types: tuple[str, ...] | None = None
    """Send only events of these types, spelt as in the record; an event that the sink was told of is told to its end,
    whatever its type becomes. Default: all."""
    event_sources: tuple[str, ...] | None = None
    """Send only events of these sources (Platform, User). Default: all."""
    timeout_seconds: float = 10.0
    """Wall-clock deadline of one send, in seconds."""
    max_batch: int = 1
    """The most records in one send."""
    max_age_seconds: float | None = None
    """Give up on a record so many seconds after it was observed (expired, counted). Default: never."""
    heartbeat: bool = False
    """Also send heartbeats."""


class Sink(ABC):
    """A destination for transition records; one instance for each ``[[sinks]]`` table."""

    Config: ClassVar[type[SinkConfig]] = SinkConfig
    """A frozen struct; its fields are the table's keys."""

    batch_by_event: ClassVar[bool] = False
    """True: a batch never mixes EventIds (one request of this destination carries one key)."""

    send_test_by_name_only: ClassVar[bool] = False
    """True: `send-test` leaves this sink out unless it is named (it runs a command)."""

    sent_nothing: bool = False
    """True after a `send` that made no request, because the format has nothing to say of that record.

    The record counts as delivered, but not as a sign that the destination accepts anything.
    """

    @classmethod
    def current_state_only(cls, config: Any) -> bool:
        """Return whether the destination needs only the current state of each event, for example for alerts.

        A newer record of an event then replaces the pending records of the same event, and replaced records count as
        expired. The newest record is always sent, also an ending: a resolve for an unknown alert must have no effect.
        """
        del config
        return False

    @classmethod
    def refresh_seconds(cls, config: Any) -> float | None:
        """Return the interval in which the host sends active events again; None for never.

        For a destination that loses its alerts on a restart. The host sends the newest record of each active event
        again under the same id, unless a newer record of the event is pending.
        """
        del config
        return None

    @classmethod
    def shown_by_check(cls, config: Any) -> str:
        """Return the result of a successful `check` for `check-config --connect`: what was tested and what was not."""
        del config
        return "its own check found nothing wrong."

    @classmethod
    def check_labels(cls, config: Any, labels: Mapping[str, str]) -> None:
        """Raise ValueError if *config* does not fit *labels*, which the configuration adds to every record."""
        del config, labels

    @classmethod
    def withholding(cls, config: Any, variables: frozenset[str]) -> Any:
        """Return *config* so that no program of the sink sees *variables*, which hold secrets of any table.

        A sink that starts programs adds them to what it passes to `Runner.run` as *without*. By default *config*.
        """
        del variables
        return config

    def __init__(self, config: Any) -> None:
        self.config = config

    def attest_by(self, tokens: AttestedTokens) -> None:
        """Take how to get a portal's token for this VM; the host calls this right after the constructor."""
        del tokens

    @abstractmethod
    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch*, at least one and at most ``max_batch`` records, as one request."""

    def prepare_next(self, batch: Sequence[TransitionRecord]) -> None:
        """Take a hint, right before `send`, which *batch* probably follows: it may be encoded while the peer answers.

        It sends nothing and does not block; the batch of the next `send` may be another one.
        """

    def check(self) -> None:
        """Try the destination without writing to it; raise DeliveryFailed with what is wrong."""

    def close(self) -> None:
        """Let go of every connection; may be called twice, or while a send hangs in another thread."""
