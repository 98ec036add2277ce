"""Every exception the bridge raises on purpose.

    BridgeError
    ├── ConfigurationError      the file is wrong; carries every mistake at once
    │   └── UnknownSinkType     no installed sink has that name
    ├── ImdsError               the metadata service gave no usable answer
    │   ├── ImdsUnreachable     refused, reset, or silent past the deadline
    │   ├── ImdsStatus          an answer, but not a 200
    │   └── DocumentInvalid     a 200 whose body is no Scheduled Events document
    ├── DeadlineExceeded        a request was cut at its wall-clock deadline
    ├── StateDirectoryError     the state directory cannot be made or is taken
    ├── OutboxError             the outbox cannot do what was asked of it
    │   └── StreamChanged       the outbox was started over meanwhile; read its state again
    ├── ScenarioError           a simulator scenario file is wrong
    ├── RefusedDecision         a decision about an event does not count; carries the RefusalReason
    ├── KeyUnusable             a trusted key cannot be used
    │   └── KeyMissing          its file is gone
    ├── SigningFailed           a decision cannot be signed
    ├── PortalFailed            the ops portal gave no usable answer
    ├── CredentialFailed        a token to show cannot be had
    └── DeliveryError           what a sink says of a send
        ├── DeliveryFailed      nothing accepted for now: it is tried again
        │   └── SecretUnavailable  a file or a variable has no secret to send with
        └── DeliveryRejected    refused for good: the record is parked

Those of one command stand in `bridge.cli`, those of the simulator in `bridge.testing.simulator.errors`; each is a
BridgeError too.

A message says what failed, with the value, and what to do about it. Callers catch the narrowest class; only the
top of a thread catches Exception.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path


class BridgeError(Exception):
    """The root of every exception the bridge raises on purpose."""


class ConfigurationError(BridgeError):
    """The configuration in *file* is invalid. *mistakes* has one sentence for each mistake."""

    def __init__(self, *mistakes: str, file: Path | None = None) -> None:
        self.mistakes = mistakes
        self.file = file
        super().__init__("\n".join(mistakes))


class UnknownSinkType(ConfigurationError):
    """No installed sink has the name that a ``[[sinks]]`` table asks for."""


class ImdsError(BridgeError):
    """The metadata service gave no usable answer: the state of the world is unknown, not empty."""


class ImdsUnreachable(ImdsError):
    """No answer: the connection was refused, broke, or stayed silent past the deadline."""


class ImdsStatus(ImdsError):
    """An answer with a status other than 200; *retry_after_seconds* is None unless the header named one."""

    def __init__(self, message: str, *, status: int, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class DocumentInvalid(ImdsError):
    """A 200 whose body is not a well-formed Scheduled Events document."""


class DeadlineExceeded(BridgeError):
    """A request was cut at its wall-clock deadline."""


class StateDirectoryError(BridgeError):
    """The state directory cannot be made, or another agent holds it."""


class OutboxError(BridgeError):
    """The outbox cannot do what was asked of it."""


class StreamChanged(OutboxError):
    """The outbox was started over since the state was read: what follows from that state is void."""


class ScenarioError(BridgeError):
    """A scenario for the simulator is wrong; the message names the step and the key."""


class DeliveryError(BridgeError):
    """What a sink says of a send that did not end with every record accepted."""


class RetryReason(str, Enum):
    """Why a send is tried again: the words of this project's sinks for the metric of retries."""

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
    """The destination accepted nothing of the batch for now; the host sends the batch again later.

    *retry_after* is the wait in seconds that the peer asks for; it applies to the whole sink, up to an hour.
    *needs_attention*: a person must act (a token expired, a URL does not exist). The host logs this once as an ERROR
    and exports it. *held* pauses the sink until a restart or `outbox retry`; an HTTP 410 is the only known case.
    *reason* is the label for the metric of retries: a `RetryReason`, ``status_503``, or a word of the sink's own.
    """

    def __init__(
        self,
        message: str,
        retry_after: float | None = None,
        *,
        needs_attention: bool = False,
        held: bool = False,
        reason: RetryReason | str = RetryReason.FAILED,
    ) -> None:
        super().__init__(message)
        self.reason = reason.value if isinstance(reason, RetryReason) else reason
        self.retry_after = retry_after
        self.needs_attention = needs_attention or held
        self.held = held


class SecretUnavailable(DeliveryFailed):
    """A secret is not in the file or the variable that the configuration names; a person must put it there."""

    def __init__(self, message: str) -> None:
        super().__init__(message, needs_attention=True)


class DeliveryRejected(DeliveryError):
    """The destination refused records for good; sending them again would not help.

    *records* names the refused ones, which are parked; the others of the batch are sent again. Left empty it means
    the whole batch: one record is parked, more than one are sent again one by one until the culprit is found.

    *may_be_endpoint*: the answer fits a wrong endpoint as well as a wrong record (an HTTP 400 comes from a TLS port
    that was spoken to in the clear, too). Then nothing is parked while the endpoint has accepted nothing since the
    configuration changed, nor when it refuses different events in a row; *reason* is then the word for the metric of
    retries.
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


class RefusalReason(str, Enum):
    """Why a decision was not followed: stable words, in the order in which the checks run.

    They stand in records, metrics and alert rules, so a word is never renamed. The first group is found before a
    signature verified; until then a token is a stranger's text, and nothing of it is kept. From the second group on
    the signature is the approver's, and what the token claims may be recorded.
    """

    MALFORMED = "malformed"
    BAD_ALGORITHM = "bad_algorithm"
    BAD_TYPE = "bad_type"
    BAD_HEADER = "bad_header"
    UNKNOWN_KEY = "unknown_key"
    KEY_UNUSABLE = "key_unusable"
    FORGED = "forged"

    MALFORMED_CLAIMS = "malformed_claims"
    WRONG_ISSUER = "wrong_issuer"
    WRONG_AUDIENCE = "wrong_audience"
    LIFETIME_TOO_LONG = "lifetime_too_long"
    ISSUED_BEFORE_THIS_OUTBOX = "issued_before_this_outbox"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"

    REPLAYED = "replayed"
    EVENT_UNKNOWN = "event_unknown"
    EVENT_NOT_SCHEDULED = "event_not_scheduled"
    EVENT_CHANGED = "event_changed"
    SUPERSEDED = "superseded"
    TOO_FEW_APPROVERS = "too_few_approvers"

    @property
    def is_verified(self) -> bool:
        """Return whether the signature had verified when this was found."""
        return self not in _BEFORE_THE_SIGNATURE


_BEFORE_THE_SIGNATURE = frozenset(
    {
        RefusalReason.MALFORMED,
        RefusalReason.BAD_ALGORITHM,
        RefusalReason.BAD_TYPE,
        RefusalReason.BAD_HEADER,
        RefusalReason.UNKNOWN_KEY,
        RefusalReason.KEY_UNUSABLE,
        RefusalReason.FORGED,
    }
)


class RefusedDecision(BridgeError):
    """A signed decision does not count, for *reason*.

    *approver* is the signer, None unless the signature verified. *decision_id*, *event_id*, and *payload_sha256* are
    its claims, and None if the signed text could not be read. If the signature was not verified, the message contains
    nothing of the token.
    """

    def __init__(
        self,
        reason: RefusalReason,
        message: str,
        *,
        approver: str | None = None,
        decision_id: str | None = None,
        event_id: str | None = None,
        payload_sha256: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.approver = approver
        self.decision_id = decision_id
        self.event_id = event_id
        self.payload_sha256 = payload_sha256


class KeyUnusable(BridgeError):
    """A key file cannot be read, or holds no Ed25519 key; the message names the file and what to do."""


class KeyMissing(KeyUnusable):
    """There is no such key file: the key was taken away, and what it signed does not count any more."""


class SigningFailed(BridgeError):
    """No key pair or no decision was made; the message says why and what to do."""


class PortalFailed(BridgeError):
    """The portal sent no usable response. *needs_attention*: a person must act first."""

    def __init__(
        self, message: str, *, needs_attention: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.needs_attention = needs_attention
        self.retry_after_seconds = retry_after_seconds


class CredentialFailed(BridgeError):
    """There is no token to show; *needs_attention*: nor will there be before a person has acted.

    *retry_after_seconds* is the wish of who gives the tokens, None when there is none.
    """

    def __init__(self, message: str, *, needs_attention: bool, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.needs_attention = needs_attention
        self.retry_after_seconds = retry_after_seconds
