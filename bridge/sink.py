"""The interface between the agent and its sinks.

If you write a sink, import all names from this module.

A sink sends records to one kind of destination, such as a webhook or an event hub. The agent creates one instance of
the sink class for each `[[sinks]]` table in the configuration and calls the instance from a single thread. To cancel a
`send`, the agent calls `close` from another thread.

- The constructor receives the settings of the table and must return quickly. Connect when the first record is sent.
- `send` sends one request. Return normally only if the destination accepted every record in the batch. Raise
  `DeliveryFailed` if the destination accepted no record and a retry might succeed. Raise `DeliveryRejected` if the
  destination rejected records permanently. The agent treats any other exception as `DeliveryFailed`.
- The agent retries, filters, counts, and logs for all sinks. Do not implement these functions in a sink. A sink must
  not sleep, and must not use the outbox.
- `send` must return within `config.timeout_seconds`. If `send` takes longer, the agent calls `close` and creates a new
  instance before the next attempt.
- The agent sends the records of one event in order. Each record is delivered at least once. After a crash, the agent
  might send a record again with the same `id`. If a sink requests refreshes, the agent also sends the newest record of
  each active event again (`Sink.refresh_seconds`).

Do not import any other module of the agent, because other modules can change between versions. This module also exports
what sinks commonly need, such as HTTP sessions with a deadline, secrets, and access tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

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
from bridge.events.otel_resource import OTEL_PREFIX, SERVICE_NAME, own_version, resource_attributes, unix_nanoseconds
from bridge.events.record import Evidence, Impact, Pause, TimelineEntry, Transition, TransitionRecord
from bridge.http.connection import DeadlineConnection, HttpResponse
from bridge.http.failures import causes, is_loopback, root_cause
from bridge.http.retry_after import retry_after_seconds
from bridge.http.tls_files import tls_file_problems
from bridge.system.access_tokens import AccessToken, RenewedToken, fetch_token, token_of
from bridge.system.extras import how_to_install
from bridge.system.run_and_kill import PASSING_ERRORS, Ending, Finished, Runner, find_program
from bridge.system.scopes import check_scope
from bridge.system.secrets import Secret, masked
from bridge.system.threads import run_daemon
from bridge.text import duration, escaped, excerpt, one_line

if TYPE_CHECKING:
    import requests

    from bridge.http.session import DeadlineSession, ResponseUnread

__all__ = [
    "ENVIRONMENT_PREFIX",
    "OTEL_PREFIX",
    "PASSING_ERRORS",
    "SERVICE_NAME",
    "URGENT_EVENT_TYPES",
    "AccessToken",
    "AttestedTokens",
    "BridgeError",
    "CredentialFailed",
    "DeadlineConnection",
    "DeadlineExceeded",
    "DeadlineSession",
    "DeliveryError",
    "DeliveryFailed",
    "DeliveryRejected",
    "Ending",
    "Evidence",
    "Finished",
    "HttpResponse",
    "Impact",
    "Pause",
    "RenewedToken",
    "ResponseUnread",
    "RetryReason",
    "Runner",
    "ScheduledEvent",
    "Secret",
    "SecretUnavailable",
    "Sink",
    "SinkConfig",
    "TimelineEntry",
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
    "own_version",
    "parse_time",
    "resource_attributes",
    "retry_after_seconds",
    "root_cause",
    "run_daemon",
    "tls_file_problems",
    "token_of",
    "unix_nanoseconds",
    "utc_now",
]


def __getattr__(name: str) -> object:
    """Import the HTTP session on first use, because loading `requests` takes time and memory."""
    if name in {"DeadlineSession", "ResponseUnread"}:
        from bridge.http import session  # noqa: PLC0415

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class AttestedTokens(Protocol):
    """Requests access tokens from a portal with Azure's attested document."""

    def __call__(self, post: Callable[[str, bytes], requests.Response], *, portal: str) -> RenewedToken:
        """Return a renewable access token.

        The first call of its method `current` requests the token.

        *post* sends a JSON body to a path below the portal's URL and returns the HTTP response, whatever its status. It
        is called in a separate thread and raises a BridgeError if the portal does not respond. Error messages refer to
        the portal as *portal*.
        """


class SinkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every sink. The configuration class of a sink can add more settings."""

    name: str = ""
    """Name of this sink in logs, metrics, and the outbox. Default: the type. A new name creates a new sink."""
    scope: Literal["mine", "all"] = "mine"
    """mine: send events that name this VM, and events that name no VM. all: send all events. While the name of this
    VM is unknown, mine also sends all events."""
    speak: Literal["each", "first"] = "each"
    """each: every VM that an event names sends the event. first: only the first VM in Resources sends the event. Use
    first for chat and mail, to get one message per transition. If the agent on the first VM is not running, no other
    agent sends the event, so also configure a sink with each for alerts and logs. The VM that posted an approval always
    sends the outcome of the approval."""
    transitions: tuple[str, ...] | None = None
    """Send only these transitions. Default: all."""
    event_types: tuple[str, ...] | None = None
    """Send only events of these types, spelled as in the record. After a sink has received a record of an event, the
    sink receives all later records of the event, even if the type changes. Default: all."""
    event_sources: tuple[str, ...] | None = None
    """Send only events from these sources (Platform, User). Default: all."""
    timeout_seconds: float = 10.0
    """Wall-clock deadline for one send, in seconds."""
    max_batch: int = 1
    """Maximum number of records in one send."""
    max_age_seconds: float | None = None
    """Maximum age of a record in seconds. Older records expire, and a metric counts them. Default: no limit."""
    heartbeat: bool = False
    """Also send heartbeats."""


class Sink(ABC):
    """A destination for records. The agent creates an instance for each `[[sinks]]` table."""

    Config: ClassVar[type[SinkConfig]] = SinkConfig
    """The sink's settings. Each field is a key in the `[[sinks]]` table."""

    batch_by_event: ClassVar[bool] = False
    """True if all records in a batch must belong to the same event."""

    send_test_by_name_only: ClassVar[bool] = False
    """True if `send-test` must skip this sink unless the command line names the sink."""

    sent_nothing: bool = False
    """True if the last `send` made no request, because the format of the destination cannot express the record.

    Such a record counts as delivered, but does not prove that the destination accepts records.
    """

    @classmethod
    def current_state_only(cls, config: Any) -> bool:
        """Return whether the destination needs only the current state of each event.

        Return True for a destination such as an alerting system, which needs only the latest record of an event. Each
        new record then replaces all pending records of its event, and these count as expired.

        The destination must ignore a record that ends an unknown event, because earlier records might be missing.
        """
        del config
        return False

    @classmethod
    def refresh_seconds(cls, config: Any) -> float | None:
        """Return the seconds between refreshes of active events, or None for no refreshes.

        Use refreshes for a destination that can lose its data when it restarts. At each refresh, the agent resends the
        latest record of every active event with its original `id`, unless the event has a pending record.
        """
        del config
        return None

    @classmethod
    def shown_by_check(cls, config: Any) -> str:
        """Return what `check` has tested, for `check-config --connect` to print on success."""
        del config
        return "the check of the sink found no problem."

    @classmethod
    def check_warnings(cls, config: Any) -> Sequence[str]:
        """Return warnings for `check-config` to print. The method must not use the network."""
        del config
        return ()

    @classmethod
    def check_labels(cls, config: Any, labels: Mapping[str, str]) -> None:
        """Raise ValueError if this sink cannot send *labels*, which the agent adds to records."""
        del config, labels

    @classmethod
    def withholding(cls, config: Any, variables: frozenset[str]) -> Any:
        """Return a copy of *config* that removes *variables* from its programs' environment.

        *variables* are the environment variables that contain the secrets of all sinks. If your sink starts programs,
        override this method so that they do not inherit these variables. Other sinks return *config* unchanged.
        """
        del variables
        return config

    def __init__(self, config: Any) -> None:
        self.config = config

    def attest_by(self, tokens: AttestedTokens) -> None:
        """Store *tokens*, a source of portal tokens. Called once, right after the constructor."""
        del tokens

    @abstractmethod
    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch* as one request. The batch contains between 1 and `max_batch` records."""

    def warm_up(self) -> None:
        """Do slow work before the first `send`, such as the import of an SDK.

        The agent calls this method once, after it has read the first valid Scheduled Events document, and only while
        the sink has no records to send. The agent ignores exceptions from this method.
        """

    def prepare_next(self, batch: Sequence[TransitionRecord]) -> None:
        """Prepare the next batch while the destination processes the current batch.

        The agent calls this method immediately before `send`. Override it to encode the following records early. The
        method must not send data or block, and the next `send` might receive different records.
        """

    def check(self) -> None:
        """Test the destination without writing data to it. Raise DeliveryFailed if the test fails."""

    def close(self) -> None:
        """Close every connection. The agent can call this more than once, or during a `send`."""
