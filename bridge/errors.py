"""The exceptions of the bridge.

    BridgeError
    ├── ConfigurationError      the file is invalid; lists every mistake
    │   └── UnknownSinkType     no installed sink has that name
    ├── ImdsError               the metadata service sent no usable response
    │   ├── ImdsUnreachable     connection refused, reset, or timed out
    │   ├── ImdsStatus          a response with a status other than 200
    │   └── DocumentInvalid     a 200 with an invalid Scheduled Events document
    ├── DeadlineExceeded        a request was canceled at its wall-clock deadline
    ├── StateDirectoryError     the state directory cannot be created or is in use
    ├── OutboxError             an outbox operation failed
    │   └── StreamChanged       the outbox was reset; read its state again
    ├── ScenarioError           a simulator scenario file is invalid
    ├── KeyUnusable             a trusted key cannot be used
    │   └── KeyMissing          the key file does not exist
    ├── SigningFailed           a decision cannot be signed
    ├── PortalFailed            the ops portal sent no usable response
    ├── CredentialFailed        a token cannot be obtained
    └── DeliveryError           a send did not succeed
        ├── DeliveryFailed      temporary failure: the batch is retried
        │   └── SecretUnavailable  a file or variable does not contain the secret
        └── DeliveryRejected    rejected permanently: the record is parked

The refusal of a token is in `bridge.approval.decision_token`. Exceptions of a single command are in `bridge.cli`.
Exceptions of the simulator are in `bridge.testing.simulator.errors`. All of these exceptions derive from BridgeError.

A message states the failure, the value, and the required action. Callers catch the narrowest class. Only the top level
of a thread catches Exception.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path


class BridgeError(Exception):
    """The base class of all exceptions of the bridge."""


class ConfigurationError(BridgeError):
    """The configuration in *file* is invalid. *mistakes* has one sentence for each mistake."""

    def __init__(self, *mistakes: str, file: Path | None = None) -> None:
        self.mistakes = mistakes
        self.file = file
        super().__init__("\n".join(mistakes))


class UnknownSinkType(ConfigurationError):
    """No installed sink type has the name in a ``[[sinks]]`` table."""


class ImdsError(BridgeError):
    """The metadata service sent no usable response, so the state of the events is unknown."""


class ImdsUnreachable(ImdsError):
    """No response: the connection was refused, was reset, or timed out."""


class ImdsStatus(ImdsError):
    """A response with a status other than 200.

    *retry_after_seconds* is None if the response has no Retry-After header.
    """

    def __init__(self, message: str, *, status: int, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class DocumentInvalid(ImdsError):
    """A 200 with a body that is not a valid Scheduled Events document."""


class DeadlineExceeded(BridgeError):
    """A request was canceled at its wall-clock deadline."""


class StateDirectoryError(BridgeError):
    """The state directory cannot be created, or another agent uses it."""


class OutboxError(BridgeError):
    """An outbox operation failed."""


class StreamChanged(OutboxError):
    """The outbox was reset after the caller read its state. Read the state again."""


class ScenarioError(BridgeError):
    """A simulator scenario is invalid. The message names the step and the key."""


class DeliveryError(BridgeError):
    """The destination did not accept every record of a send."""


class RetryReason(str, Enum):
    """Why a send is retried: label values of the built-in sinks for the retry metric."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    TLS = "tls"
    PROXY = "proxy"
    BUSY = "busy"
    REFUSED = "refused"
    SETTINGS = "settings"
    HANGING = "hanging"
    CUT = "cut"
    EXCEPTION = "exception"
    FAILED = "failed"


class DeliveryFailed(DeliveryError):
    """The destination accepted no record of the batch. The host retries the batch later.

    - *retry_after*: the delay in seconds that the peer requests. The delay applies to the whole sink, up to one hour.
    - *needs_attention*: a person must act, for example because a token expired or a URL does not exist. The host logs
      one ERROR and exports a metric.
    - *gone*: pause the sink until a restart or `outbox retry`. An HTTP 410 is the only known case.
    - *reason*: the label of the retry metric. The label is a `RetryReason`, ``status_503``, or a value that the sink
      defines.
    """

    def __init__(
        self,
        message: str,
        retry_after: float | None = None,
        *,
        needs_attention: bool = False,
        gone: bool = False,
        reason: RetryReason | str = RetryReason.FAILED,
    ) -> None:
        super().__init__(message)
        self.reason = reason.value if isinstance(reason, RetryReason) else reason
        self.retry_after = retry_after
        self.needs_attention = needs_attention or gone
        self.gone = gone


class SecretUnavailable(DeliveryFailed):
    """The configured file or variable does not contain the secret. A person must add it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, needs_attention=True)


class DeliveryRejected(DeliveryError):
    """The destination rejected records permanently. A retry would not succeed.

    *records* lists the rejected records. The host parks the rejected records and sends the rest of the batch again. If
    *records* is empty, the destination rejected the whole batch. The host parks a single record. The host sends several
    records again, one at a time, to find the rejected record.

    *may_be_endpoint*: the cause might be a wrong endpoint instead of a wrong record. For example, a TLS port also
    responds with HTTP 400 to a plain HTTP request. The host parks no record in either of these cases:

    - The endpoint has accepted no record since the configuration changed.
    - The endpoint rejects different events in a row.

    *reason* is then the label of the retry metric.
    """

    may_be_endpoint = False
    reason: str = RetryReason.REFUSED.value

    def __init__(
        self,
        message: str,
        records: tuple[object, ...] | list[object] = (),
        *,
        may_be_endpoint: bool = False,
        reason: RetryReason | str = RetryReason.REFUSED,
    ) -> None:
        super().__init__(message)
        self.records = tuple(records)
        self.may_be_endpoint = may_be_endpoint
        self.reason = reason.value if isinstance(reason, RetryReason) else reason


class KeyUnusable(BridgeError):
    """A key file cannot be read or contains no Ed25519 key.

    The message states the file and the required action.
    """


class KeyMissing(KeyUnusable):
    """The key file does not exist. Decisions signed with the removed key are invalid."""


class SigningFailed(BridgeError):
    """A key pair or a decision was not created. The message states the reason and the action."""


class PortalFailed(BridgeError):
    """The portal sent no usable response. *needs_attention*: a person must act."""

    def __init__(
        self, message: str, *, needs_attention: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.needs_attention = needs_attention
        self.retry_after_seconds = retry_after_seconds


class CredentialFailed(BridgeError):
    """A token cannot be obtained. *needs_attention*: a person must act.

    *retry_after_seconds* is the delay that the token issuer requests, or None.
    """

    def __init__(self, message: str, *, needs_attention: bool, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.needs_attention = needs_attention
        self.retry_after_seconds = retry_after_seconds
