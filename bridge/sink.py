"""The sink contract: `Sink`, `SinkConfig`, and all other names that a sink author imports.

The host calls a sink from one thread. Only `close` may run in another thread, while the host cancels a `send`.

- The constructor receives its ``Config`` and must return quickly. Connect on demand.
- ``send(batch)`` sends one request. Return only if the destination accepted every record, as durably as it can confirm.
  Raise `DeliveryFailed` if the destination accepted no record and a retry may succeed. Raise `DeliveryRejected` if the
  destination rejected records permanently. The host treats any other exception as DeliveryFailed.
- A sink never sleeps, retries, filters, counts, or logs an outcome, and does not use the outbox. The host does this
  work for all sinks.
- Return within ``config.timeout_seconds`` of wall-clock time. Otherwise, the host calls ``close`` and creates a new
  instance before the next attempt.
- The records of one EventId arrive in order. Delivery is at least once. After a crash, the host may send a record again
  with the same ``id``. If a sink requests refreshes, the host also sends the newest record of each active event again
  (`Sink.refresh_seconds`).

This module also exports shared code for sinks: a session with a deadline, secrets, tokens, programs, and text
functions. Import no other module of the agent, because the agent's modules may move.
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
    """Creates the token for a portal that attests the VM (PROTOCOL.md, section 2)."""

    def __call__(self, post: Callable[[str, bytes], requests.Response], *, portal: str) -> RenewedToken:
        """Return the token. The first request starts when `current` of the token is called.

        *portal* is the name of the portal in messages. *post* sends a JSON body to a path below the URL of the portal
        and returns the response, with any status. If there is no response, *post* raises a BridgeError. *post* runs in
        another thread.
        """


class SinkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of every ``[[sinks]]`` table. The Config of each sink adds its own keys."""

    name: str = ""
    """Name of this sink in logs, metrics, and the outbox. Default: the type. A new name creates a new sink."""
    scope: Literal["mine", "all"] = "mine"
    """mine: send events that name this VM or no VM. While this VM's name is unknown, send all events. all: send all
    events."""
    speak: Literal["each", "first"] = "each"
    """each: every VM that an event names sends the event. first: only the first VM in Resources sends the event. Use
    first for chat and mail, to send one message per transition instead of one per VM. The VM that sent an approval also
    sends the outcome of the approval. If the agent of the first VM is not running, no other agent sends the event.
    Therefore, keep a sink with `each` for alerts and logs."""
    transitions: tuple[str, ...] | None = None
    """Send only these transitions. Default: all."""
    event_types: tuple[str, ...] | None = None
    """Send only events of these types, spelled as in the record. After the sink has received an event, the sink
    receives all later transitions of the event, even if the type changes. Default: all."""
    event_sources: tuple[str, ...] | None = None
    """Send only events of these sources (Platform, User). Default: all."""
    timeout_seconds: float = 10.0
    """Wall-clock deadline of one send, in seconds."""
    max_batch: int = 1
    """Maximum number of records in one send."""
    max_age_seconds: float | None = None
    """Expire and count a record this many seconds after it was observed. Default: never."""
    heartbeat: bool = False
    """Also send heartbeats."""


class Sink(ABC):
    """A destination for transition records, with one instance for each ``[[sinks]]`` table."""

    Config: ClassVar[type[SinkConfig]] = SinkConfig
    """A frozen struct. Its fields are the keys of the table."""

    batch_by_event: ClassVar[bool] = False
    """True: a batch contains one EventId, because a request to this destination has one key."""

    send_test_by_name_only: ClassVar[bool] = False
    """True: `send-test` skips this sink unless named, because the sink runs a command."""

    sent_nothing: bool = False
    """True after a `send` that made no request because the format does not cover the record.

    The record counts as delivered, but does not prove that the destination accepts records.
    """

    @classmethod
    def current_state_only(cls, config: Any) -> bool:
        """Return whether the destination needs only the current state of each event.

        Destinations for alerts are an example. For such a destination, a newer record of an event replaces the pending
        records of the same event, and each replaced record counts as expired. The host always sends the newest record,
        even if the record ends the event. Therefore, a resolve for an unknown alert must have no effect.
        """
        del config
        return False

    @classmethod
    def refresh_seconds(cls, config: Any) -> float | None:
        """Return the interval in seconds between refreshes of active events, or None for never.

        Use refreshes for a destination that loses its alerts on a restart. The host sends the newest record of each
        active event again with the same ``id``, unless a newer record of the event is pending.
        """
        del config
        return None

    @classmethod
    def shown_by_check(cls, config: Any) -> str:
        """Return the result of a successful `check` for `check-config --connect`.

        The text states the tested and the untested parts.
        """
        del config
        return "the check of the sink found no problem."

    @classmethod
    def check_labels(cls, config: Any, labels: Mapping[str, str]) -> None:
        """Raise ValueError if *config* does not work with *labels*.

        The configuration adds *labels* to every record.
        """
        del config, labels

    @classmethod
    def withholding(cls, config: Any, variables: frozenset[str]) -> Any:
        """Return *config* so that programs of the sink do not inherit *variables*.

        The environment *variables* contain secrets of all tables. A sink that starts programs adds *variables* to the
        argument *without* of `Runner.run`. By default, this method returns *config* unchanged.
        """
        del variables
        return config

    def __init__(self, config: Any) -> None:
        self.config = config

    def attest_by(self, tokens: AttestedTokens) -> None:
        """Store *tokens*, which creates the portal's token for this VM.

        The host calls this method immediately after the constructor.
        """
        del tokens

    @abstractmethod
    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch*, which has 1 to ``max_batch`` records, as one request."""

    def prepare_next(self, batch: Sequence[TransitionRecord]) -> None:
        """Prepare *batch*, the probable next batch, while the peer responds to the current batch.

        The host calls this method right before `send`. For example, a sink can encode *batch* early. The method sends
        nothing and does not block. The next `send` may receive a different batch.
        """

    def check(self) -> None:
        """Test the destination without writing to it. Raise DeliveryFailed if the test fails."""

    def close(self) -> None:
        """Close every connection. The host may call this method twice or during a `send`."""
