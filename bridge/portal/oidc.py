"""A client for an OpenID Connect provider.

The state, the nonce, and the PKCE verifier of a login are derived from one random secret in a cookie of the browser.
Therefore, any process of the portal can finish a login that another process started. The client checks the signature,
the exact issuer, the audience, and the times of every ID token, and the nonce after a login. It accepts only RS256 and
ES256.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import threading
from typing import Any
from urllib.parse import quote

import msgspec
import requests
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from bridge.clock import Clock
from bridge.errors import BridgeError, SecretUnavailable
from bridge.http.session import DeadlineSession
from bridge.logs import ThrottledLog
from bridge.portal.settings import OidcSettings

logger = logging.getLogger(__name__)

_ALGORITHMS = ["RS256", "ES256"]
_DEADLINE_SECONDS = 5.0
_KEPT_SECONDS, _AGAIN_SECONDS = 600.0, 60.0
_LEEWAY_SECONDS = 30
_OK = 200


class LoginRefused(BridgeError):
    """The provider or the portal refuses the login. The user sees the error message."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A user whom the provider authenticated."""

    subject: str
    name: str
    groups: tuple[object, ...]
    refresh_token: str | None


class OidcProvider:
    """The provider in *settings*. All methods block and are thread-safe."""

    def __init__(self, settings: OidcSettings, *, redirect_uri: str, clock: Clock) -> None:
        self._settings = settings
        self._redirect_uri = redirect_uri
        self._clock = clock
        self._lock = threading.Lock()
        self._documents: dict[str, tuple[float, dict[str, Any]]] = {}
        """For each URL, the time of the last request, and the response."""
        self._log = ThrottledLog(logger, clock=clock)

    def check(self) -> None:
        """Request the provider's metadata and keys. Raise LoginRefused if they cannot be read."""
        self._read_keys(0.0)

    def authorization_url(self, secret: str) -> str:
        """Return the URL of the provider's login page, for the login with *secret* (`derived`)."""
        url: str = prepare_grant_uri(
            self._endpoint("authorization_endpoint"),
            client_id=self._settings.client_id,
            response_type="code",
            redirect_uri=self._redirect_uri,
            scope=" ".join(self._settings.scopes),
            state=derived(secret, "state"),
            nonce=derived(secret, "nonce"),
            code_challenge=create_s256_code_challenge(derived(secret, "verifier")),
            code_challenge_method="S256",
        )
        return url

    def logout_url(self) -> str | None:
        """Return the URL of the provider's logout page, or None if the provider has none."""
        url = self._read_metadata().get("end_session_endpoint")
        return f"{url}?client_id={quote(self._settings.client_id, safe='')}" if isinstance(url, str) else None

    def exchanged(self, secret: str, code: str) -> Identity:
        """Return the user for an authorization code. Raise LoginRefused."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": derived(secret, "verifier"),
        }
        return self._identity(self._tokens(form), {"nonce": derived(secret, "nonce")})

    def refreshed(self, refresh_token: str, subject: str) -> Identity:
        """Return the user with the current groups. Raise LoginRefused."""
        tokens = self._tokens({"grant_type": "refresh_token", "refresh_token": refresh_token})
        identity = self._identity({"refresh_token": refresh_token, **tokens}, {})
        if identity.subject != subject:
            raise LoginRefused("The provider returned another user.")
        return identity

    def _identity(self, tokens: dict[str, Any], params: dict[str, str]) -> Identity:
        claims = self._claims(tokens.get("id_token"), params)
        subject, name = claims["sub"], claims.get(self._settings.name_claim) or claims["sub"]
        if not isinstance(subject, str) or not subject or not isinstance(name, str):
            raise LoginRefused("The ID token has no valid subject or name.")
        names = claims.get("_claim_names")
        is_overage = isinstance(names, dict) and self._settings.groups_claim in names
        if is_overage or claims.get("hasgroups"):
            raise LoginRefused(
                "You are a member of too many groups, so Entra ID does not list them. Ask an administrator to send "
                "only the groups that are assigned to the application."
            )
        groups = claims.get(self._settings.groups_claim)
        refresh = tokens.get("refresh_token")
        return Identity(
            subject=subject,
            name=name,
            groups=tuple(groups) if isinstance(groups, list) else (),
            refresh_token=refresh if isinstance(refresh, str) else None,
        )

    def _claims(self, token: object, params: dict[str, str]) -> CodeIDToken:
        if not isinstance(token, str):
            raise LoginRefused("The provider returned no ID token.")
        try:
            decoded = self._decoded(token)
            options: Any = {
                "iss": {"essential": True, "value": self._settings.issuer},
                "aud": {"essential": True, "value": self._settings.client_id},
                "sub": {"essential": True},
            }
            found = CodeIDToken(
                decoded.claims, decoded.header, options, {"client_id": self._settings.client_id, **params}
            )
            found.validate(now=int(self._clock.timestamp()), leeway=_LEEWAY_SECONDS)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            self._log.problem("id-token", logging.WARNING, f"An ID token was refused: {type(error).__name__}.")
            raise LoginRefused("The ID token of the provider is invalid.") from error
        return found

    def _decoded(self, token: str) -> jwt.Token:
        try:
            return jwt.decode(token, self._read_keys(_KEPT_SECONDS), algorithms=_ALGORITHMS)
        except (JoseError, ValueError):
            # The provider might have changed its keys.
            return jwt.decode(token, self._read_keys(_AGAIN_SECONDS), algorithms=_ALGORITHMS)

    def _tokens(self, form: dict[str, str]) -> dict[str, Any]:
        try:
            secret = self._settings.client_secret().value() or ""
        except SecretUnavailable as error:
            self._log.problem("secret", logging.ERROR, str(error))
            raise LoginRefused("The portal cannot read its secrets.") from error
        client = quote(self._settings.client_id, safe=""), quote(secret, safe="")
        return self._json("POST", self._endpoint("token_endpoint"), data=form, auth=client)

    def _endpoint(self, name: str) -> str:
        url = self._read_metadata().get(name)
        if not isinstance(url, str):
            raise LoginRefused(f"The identity provider publishes no {name}.")
        return url

    def _read_metadata(self) -> dict[str, Any]:
        issuer = self._settings.issuer
        found = self._document(f"{issuer.rstrip('/')}/.well-known/openid-configuration", _KEPT_SECONDS)
        if found.get("issuer") != issuer:
            message = "The issuer of the identity provider differs from people.oidc.issuer."
            self._log.problem("issuer", logging.ERROR, message)
            raise LoginRefused(message)
        return found

    def _read_keys(self, kept_seconds: float) -> KeySet:
        return KeySet.import_key_set(self._document(self._endpoint("jwks_uri"), kept_seconds))  # type: ignore[arg-type]

    def _document(self, url: str, kept_seconds: float) -> dict[str, Any]:
        now = self._clock.monotonic()
        with self._lock:
            read_at, found = self._documents.get(url, (float("-inf"), {}))
            if now - read_at >= kept_seconds:
                found = self._json("GET", url)
                self._documents[url] = now, found
            return found

    def _json(self, method: str, url: str, **parts: Any) -> dict[str, Any]:
        try:
            with DeadlineSession() as session:
                response = session.request(
                    method,
                    url,
                    deadline_seconds=_DEADLINE_SECONDS,
                    proxies=requests.utils.get_environ_proxies(url),
                    verify=self._settings.ca_file,
                    **parts,
                )
            found = response.json()
        except (requests.RequestException, BridgeError, OSError, ValueError) as error:
            self._log.problem("provider", logging.WARNING, f"The provider cannot be used: {type(error).__name__}.")
            raise LoginRefused("The identity provider is not available. Try again in a moment.") from error
        if response.status_code != _OK or not isinstance(found, dict):
            self._log.problem("status", logging.WARNING, f"The provider responded with {response.status_code}.")
            raise LoginRefused("The identity provider refused the login. Start the login again.")
        return found


def derived(secret: str, purpose: str) -> str:
    """Return the state, the nonce, or the verifier of the login with *secret*."""
    found = hmac.digest(secret.encode(), purpose.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode()
