"""The exceptions of the bridge.

    BridgeError
    ├── ConfigurationError      the configuration is invalid
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
    ├── ServiceFailed           a service failed, and a person might have to act
    │   ├── PortalFailed        the ops portal sent no usable response
    │   └── CredentialFailed    a token cannot be obtained
    └── DeliveryError           a send failed
        ├── DeliveryFailed      temporary failure: the batch is retried
        │   └── SecretUnavailable  a file or variable does not contain the secret
        └── DeliveryRejected    rejected permanently: the record is parked

`RefusedDecision` is in `bridge.approval.decision_token`. Exceptions that only commands raise are in `bridge.cli`, and
exceptions of the simulator are in `bridge.testing.simulator.errors`. All of these exceptions derive from BridgeError.

Each error message says what failed, with which value, and what to do about it. Catch the most specific class. Only the
top-level function of a thread catches Exception.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path


class BridgeError(Exception):
    """The base class of all exceptions of the bridge."""


class ConfigurationError(BridgeError):
    """The configuration is invalid. *mistakes* has one sentence for each error in *file*."""

    def __init__(self, *mistakes: str, file: Path | None = None) -> None:
        self.mistakes = mistakes
        self.file = file
        super().__init__("\n".join(mistakes))


class ImdsError(BridgeError):
    """The metadata service returned no usable response, so the state is unknown."""

    status: int | None = None
    """The response's status, or None unless the error is an ImdsStatus."""
    retry_after_seconds: float | None = None
    """The delay that the response requests, or None if it has no valid Retry-After header."""


class ImdsUnreachable(ImdsError):
    """The metadata service did not respond: refused, reset, or timed out."""


class ImdsStatus(ImdsError):
    """The metadata service responded with a status other than 200."""

    def __init__(self, message: str, *, status: int, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class DocumentInvalid(ImdsError):
    """The status is 200, but the body is not a valid Scheduled Events document."""


class DeadlineExceeded(BridgeError):
    """A request was canceled at its wall-clock deadline."""


class StateDirectoryError(BridgeError):
    """The state directory cannot be created, or another agent uses it."""


class OutboxError(BridgeError):
    """An outbox operation failed."""


class StreamChanged(OutboxError):
    """The outbox was reset after the caller read its state. The caller must read it again."""


class ScenarioError(BridgeError):
    """A scenario file of the simulator is invalid. The message names the step and the key."""


class DeliveryError(BridgeError):
    """The destination did not accept all records of a send."""


class RetryReason(str, Enum):
    """The reason why the agent retries a send. The retry metric uses this reason as a label."""

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
    """The destination did not accept any record in the batch. The agent retries the batch.

    - *retry_after*: the delay in seconds that the destination requests. The delay applies to the whole sink and is
      limited to one hour.
    - *needs_attention*: True if a person must act, for example because a token has expired or a URL does not exist.
      The agent then logs an ERROR once and sets a metric.
    - *gone*: True if the sink must pause until the agent restarts or someone runs `outbox retry`, as after status 410.
    - *reason*: the label of the retry metric. The label is a `RetryReason`, a status such as ``status_503``, or a value
      that the sink defines.
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
    """The configured file or variable does not contain the secret, or cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(message, needs_attention=True)


class DeliveryRejected(DeliveryError):
    """The destination rejected records permanently, so a retry cannot succeed.

    The agent parks *records* and resends the rest of the batch. If *records* is empty, the destination rejected the
    entire batch, so the agent resends the records one by one to find the rejected ones. If the batch contains only one
    record, the agent parks it.

    *reason* is the label of the retry metric.

    If *may_be_endpoint* is true, the problem might be the URL, not the records. For example, a TLS port responds to
    plain HTTP with status 400. In the following cases, the agent resends the records instead of parking them:

    - The endpoint has accepted no record since the configuration changed.
    - The endpoint rejects records of different events in a row.
    """

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
    """A key file cannot be read or has no Ed25519 key. The message says what to do."""


class KeyMissing(KeyUnusable):
    """The key file does not exist. The agent ignores decisions signed with this key."""


class SigningFailed(BridgeError):
    """A key pair or decision could not be created. The message says why and what to do."""


class ServiceFailed(BridgeError):
    """A service that an approval or a sink needs has failed.

    *needs_attention* means that a person must act. *retry_after_seconds* is the delay that the service requests, or
    None.
    """

    def __init__(
        self, message: str, *, needs_attention: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.needs_attention = needs_attention
        self.retry_after_seconds = retry_after_seconds


class PortalFailed(ServiceFailed):
    """The portal returned no usable response."""


class CredentialFailed(ServiceFailed):
    """An access token cannot be obtained."""
