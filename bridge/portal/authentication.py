"""Authenticates agents and programs by tokens and webhook signatures.

A refused request is counted by its reason, and each reason is logged once. `bridge.portal.users` authenticates people.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Mapping
from enum import Enum

import msgspec

from bridge.clock import Clock
from bridge.errors import SecretUnavailable
from bridge.logs import ThrottledLog
from bridge.portal.agent_tokens import AgentTokens, TokenRefused
from bridge.portal.metrics import PortalMetrics
from bridge.portal.requests import RequestRefused
from bridge.system.secrets import Secret

logger = logging.getLogger(__name__)

_SIGNED_SECONDS = 300
_VERSION = "v1"
_SECRET_PREFIX = "whsec_"  # noqa: S105  # what a secret begins with
#: Standard Webhooks: 192 to 512 bits.
_KEY_BYTES = range(24, 65)
_LONGEST_TOKEN = 4_096


class AuthenticationFailure(str, Enum):
    """The reason for a refused request, which is also the label of a metric."""

    NO_CREDENTIALS = "no_credentials"
    WRONG_TOKEN = "wrong_token"  # noqa: S105  # a word
    WRONG_SIGNATURE = "wrong_signature"
    OLD_SIGNATURE = "old_signature"
    SECRET_UNAVAILABLE = "secret_unavailable"  # noqa: S105  # a word
    NOT_YOURS = "not_yours"


class AuthenticationFailed(RequestRefused):
    """The request is refused because of *reason*; *status* is 401, 403, or 503."""

    def __init__(self, reason: AuthenticationFailure, message: str, *, status: int = 401) -> None:
        super().__init__(status, message)
        self.reason = reason


class Agent(msgspec.Struct, frozen=True):
    """An authenticated agent."""

    vm_key: str | None
    """The only VM for which the agent may act; None: the credential names no VM."""

    def may_speak_for(self, vm_key: str) -> bool:
        """Return whether the agent may send records of *vm_key* and poll for its decisions."""
        return self.vm_key is None or self.vm_key == vm_key


class Authenticator:
    """Authenticates agents and readers by the configured secrets."""

    def __init__(
        self,
        *,
        agent_token: Secret,
        webhook_secret: Secret,
        reader_token: Secret,
        metrics: PortalMetrics,
        clock: Clock,
        attested: AgentTokens | None = None,
    ) -> None:
        """Without *attested*, the portal issues no tokens for attested documents."""
        self._attested = attested
        self._agent_token = agent_token
        self._webhook_secret = webhook_secret
        self._reader_token = reader_token
        self._metrics = metrics
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)

    def agent(self, headers: Mapping[str, str], body: bytes | None = None) -> Agent:
        """Return the agent that sent *headers* and, if it is signed, *body*; raise AuthenticationFailed."""
        token = _bearer(headers)
        if token is not None and (self._agent_token.is_set or self._attested is not None):
            if self._agent_token.is_set and _is_one_of(token, self._values(self._agent_token)):
                return Agent(None)
            vm_id = self._attested_vm(token)
            if vm_id is not None:
                return Agent(vm_id)
            raise self.refused(AuthenticationFailure.WRONG_TOKEN, "This token is not known here.")
        if body is not None and "webhook-signature" in headers and self._webhook_secret.is_set:
            self._check_signature(headers, body)
            return Agent(None)
        raise self.refused(AuthenticationFailure.NO_CREDENTIALS, "Show a bearer token, or sign what is sent.")

    def _attested_vm(self, token: str) -> str | None:
        """Return the VM for which the portal issued *token*; None if it did not issue *token*."""
        if self._attested is None:
            return None
        try:
            return self._attested.vm_id_of(token)
        except TokenRefused:
            return None
        except SecretUnavailable as error:
            raise self._unavailable(str(error)) from error

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Raise AuthenticationFailed unless *headers* contain the token of a reader."""
        if not self._reader_token.is_set:
            raise self.refused(
                AuthenticationFailure.NO_CREDENTIALS,
                "Nobody may read here: the portal has no [readers] token.",
                status=403,
            )
        token = _bearer(headers)
        if token is None:
            raise self.refused(AuthenticationFailure.NO_CREDENTIALS, "Show the bearer token of a reader.")
        if not _is_one_of(token, self._values(self._reader_token)):
            raise self.refused(AuthenticationFailure.WRONG_TOKEN, "This token is not known here.")

    def refused(self, reason: AuthenticationFailure, message: str, *, status: int = 401) -> AuthenticationFailed:
        """Count and log a refused request, and return the exception to raise."""
        self._metrics.refused(reason.value)
        self._log.problem(reason, logging.WARNING, f"A caller was refused: {message}", reason=reason.value)
        return AuthenticationFailed(reason, message, status=status)

    def _check_signature(self, headers: Mapping[str, str], body: bytes) -> None:
        sent_at = headers.get("webhook-timestamp", "")
        is_number = sent_at.isascii() and sent_at.isdecimal() and len(sent_at) <= len(str(2**63))
        if not is_number or abs(self._clock.timestamp() - int(sent_at)) > _SIGNED_SECONDS:
            raise self.refused(
                AuthenticationFailure.OLD_SIGNATURE,
                f"webhook-timestamp is more than {_SIGNED_SECONDS} s away from now.",
            )
        signed = f"{headers.get('webhook-id', '')}.{sent_at}.".encode() + body
        right = [hmac.new(key, signed, hashlib.sha256).digest() for key in self._webhook_keys()]
        for part in headers["webhook-signature"].split(" ")[:16]:
            version, _, text = part.partition(",")
            if version == _VERSION and _is_any(_decoded(text), right):
                return
        raise self.refused(AuthenticationFailure.WRONG_SIGNATURE, "No webhook-signature is right.")

    def _webhook_keys(self) -> list[bytes]:
        keys = [_decoded(text.removeprefix(_SECRET_PREFIX)) for text in self._values(self._webhook_secret)]
        usable = [key for key in keys if len(key) in _KEY_BYTES]  # anybody can sign with an empty one
        if not usable:
            raise self._unavailable(
                "No secret of agents.webhook_secret is whsec_ and base64 of 24 to 64 bytes. Make one with: "
                'echo "whsec_$(openssl rand -base64 32)"'
            )
        return usable

    def _values(self, secret: Secret) -> tuple[str, ...]:
        try:
            return secret.values()
        except SecretUnavailable as error:
            raise self._unavailable(str(error)) from error

    def _unavailable(self, why: str) -> AuthenticationFailed:
        self._metrics.refused(AuthenticationFailure.SECRET_UNAVAILABLE.value)
        self._log.problem("secret", logging.ERROR, why)
        return AuthenticationFailed(
            AuthenticationFailure.SECRET_UNAVAILABLE, "The portal cannot read its own secrets.", status=503
        )


def _bearer(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip()
    return token[:_LONGEST_TOKEN] if scheme.lower() == "bearer" and token else None


def _is_one_of(token: str, known: tuple[str, ...]) -> bool:
    return _is_any(token.encode(), [each.encode() for each in known])


def _is_any(shown: bytes, known: list[bytes]) -> bool:
    """Return whether *shown* is one of *known*, in a time that does not depend on the match."""
    return sum(hmac.compare_digest(shown, each) for each in known) > 0


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
