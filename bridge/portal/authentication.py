"""Authenticates agents and programs by bearer tokens and webhook signatures.

The portal counts authentication failures by reason (`AuthenticationFailure`) and logs the first failure for each
reason.

For tokens of VMs, see `agent_tokens`. For people, see `users`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum

from bridge.errors import BridgeError, SecretUnavailable
from bridge.logs import ThrottledLog
from bridge.portal.agent_tokens import AgentTokens, TokenRefused, is_one_of
from bridge.portal.requests import RequestRefused
from bridge.portal.settings import PortalSettings
from bridge.portal.site import Site
from bridge.portal.webhook_signatures import is_signed, usable_keys
from bridge.system.secrets import Secret

logger = logging.getLogger(__name__)


class AuthenticationFailure(str, Enum):
    """The reason for a refused request, used as a metric label."""

    NO_CREDENTIALS = "no_credentials"
    WRONG_TOKEN = "wrong_token"  # noqa: S105  # a word
    WRONG_SIGNATURE = "wrong_signature"
    SECRET_UNAVAILABLE = "secret_unavailable"  # noqa: S105  # a word
    NOT_YOURS = "not_yours"


class Authenticator:
    """Authenticates agents and readers by the configured secrets."""

    def __init__(self, settings: PortalSettings, site: Site, *, attested: AgentTokens | None) -> None:
        self._agent_token = settings.agents.token()
        self._webhook_secret = settings.agents.webhook_secret()
        self._reader_token = settings.readers.token()
        self._attested = attested
        self._metrics = site.metrics
        self._clock = site.clock
        self._log = ThrottledLog(logger, clock=site.clock)

    def accepts_signature(self, headers: Mapping[str, str]) -> bool:
        """Return whether *headers* contain a webhook signature instead of a token."""
        return self._webhook_secret.is_set and "webhook-signature" in headers and "authorization" not in headers

    def check_signature(self, headers: Mapping[str, str], body: bytes) -> None:
        """Raise RequestRefused unless *headers* contain a valid signature of *body*."""
        keys = usable_keys(self._values(self._webhook_secret))
        if not keys:
            raise self._unavailable(
                "agents.webhook_secret has no valid secret: whsec_ and the Base64 of 24 to 64 bytes. Create one with: "
                'echo "whsec_$(openssl rand -base64 32)"'
            )
        if not is_signed(headers, body, keys, self._clock.timestamp()):
            raise self._refused(AuthenticationFailure.WRONG_SIGNATURE, "The webhook signature is wrong or too old.")

    def own_vm(self, headers: Mapping[str, str]) -> str | None:
        """Return the VM of the agent's token, or None if the token is valid for all VMs.

        Raise RequestRefused if the token is invalid.
        """
        token = self._token_in(headers)
        error: BridgeError = TokenRefused("The token is invalid.")
        if self._attested is not None:  # first, because most agents have such a token
            try:
                return self._attested.vm_id_of(token)
            except (TokenRefused, SecretUnavailable) as refused:
                error = refused
        if self._is_one_of(token, self._agent_token):
            return None
        if isinstance(error, SecretUnavailable):
            raise self._unavailable(str(error)) from error
        raise self._refused(AuthenticationFailure.WRONG_TOKEN, str(error)) from error

    def check_vm(self, own_vm: str | None, vm_key: str) -> None:
        """Raise RequestRefused if the token of *own_vm* is not valid for *vm_key*."""
        if own_vm not in {None, vm_key}:
            raise self._refused(AuthenticationFailure.NOT_YOURS, "The token is for a different VM.", status=403)

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused unless *headers* contain the token of a reader."""
        if not self._reader_token.is_set:
            raise self._refused(AuthenticationFailure.NO_CREDENTIALS, "The portal has no [readers] token.", status=403)
        if not self._is_one_of(self._token_in(headers), self._reader_token):
            raise self._refused(AuthenticationFailure.WRONG_TOKEN, "The token is invalid.")

    def _token_in(self, headers: Mapping[str, str]) -> str:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise self._refused(AuthenticationFailure.NO_CREDENTIALS, "The request has no bearer token.")
        return token.strip()

    def _refused(self, reason: AuthenticationFailure, message: str, *, status: int = 401) -> RequestRefused:
        """Count and log a refused request. Return the exception to raise."""
        self._metrics.callers_refused.labels(reason.value).inc()
        self._log.problem(reason, logging.WARNING, f"A request was refused: {message}", reason=reason.value)
        return RequestRefused(status, message)

    def _is_one_of(self, token: str, secret: Secret) -> bool:
        """Return whether *token* is a value of *secret*, in constant time."""
        return is_one_of(token.encode(), [each.encode() for each in self._values(secret)])

    def _values(self, secret: Secret) -> tuple[str, ...]:
        try:
            return secret.values()
        except SecretUnavailable as error:
            raise self._unavailable(str(error)) from error

    def _unavailable(self, why: str) -> RequestRefused:
        self._metrics.callers_refused.labels(AuthenticationFailure.SECRET_UNAVAILABLE.value).inc()
        self._log.problem("secret", logging.ERROR, why)
        return RequestRefused(503, "The portal cannot read its secrets.")
