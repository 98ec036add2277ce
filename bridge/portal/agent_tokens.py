"""Issues and verifies challenges and tokens for agents.

A challenge is a nonce for an attested document. It contains a time and a MAC, so the portal can check its origin and
age without a database. Azure limits a nonce to 32 characters.

A token is a JWT (HS256) that identifies one VM and is valid for one hour. Any portal process with the secret can verify
the token. During a rotation, the portal signs with the first secret of the file and accepts all secrets of the file.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets as chance
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jwt

from bridge.clock import Clock
from bridge.errors import BridgeError

#: An agent uses a challenge for five minutes. The sixth minute allows for network delays.
CHALLENGE_SECONDS = 360
TOKEN_SECONDS = 3600
#: An attacker who has a token could find a shorter secret by brute force.
LEAST_SECRET_CHARACTERS = 32

_TIME_BYTES, _CHANCE_BYTES, _MAC_BYTES = 4, 4, 12
_CHALLENGE = re.compile("[a-z2-7]{32}")
_AUDIENCE = "scheduled-events-portal"
_ALGORITHM = "HS256"
_MOST_TOKEN_CHARACTERS = 2_048
#: The clock of another portal process can be ahead.
_SKEW_SECONDS = 60
#: The portal keeps the nonce of an accepted document until the challenge has expired on every clock.
KEPT_SECONDS = CHALLENGE_SECONDS + _SKEW_SECONDS


class TokenRefused(BridgeError):
    """Raised for an invalid or expired token. Never quotes the token."""


@dataclass(frozen=True)
class Challenges:
    """Creates and verifies challenges. *secrets* returns the newest secret first."""

    secrets: Callable[[], Sequence[str]]
    clock: Clock

    def new(self) -> str:
        """Return a new challenge: 32 letters and digits."""
        made_at = int(self.clock.timestamp())
        said = made_at.to_bytes(_TIME_BYTES, "big") + chance.token_bytes(_CHANCE_BYTES)
        made = said + _mac(self.secrets()[0], said)
        return base64.b32encode(made).decode().lower()

    def is_fresh(self, nonce: str) -> bool:
        """Return whether *nonce* is a challenge of this portal that has not expired."""
        if _CHALLENGE.fullmatch(nonce) is None:  # another spelling of a used challenge must not be valid
            return False
        found = base64.b32decode(nonce.upper())
        said, mac = found[: _TIME_BYTES + _CHANCE_BYTES], found[_TIME_BYTES + _CHANCE_BYTES :]
        # Check every secret, because the response time must not reveal which secret matches.
        if True not in [hmac.compare_digest(mac, _mac(secret, said)) for secret in self.secrets()]:
            return False
        made_at = int.from_bytes(said[:_TIME_BYTES], "big")
        return -_SKEW_SECONDS <= self.clock.timestamp() - made_at <= CHALLENGE_SECONDS


@dataclass(frozen=True)
class AgentTokens:
    """Issues and verifies agent tokens. *secrets* returns the newest secret first."""

    secrets: Callable[[], Sequence[str]]
    clock: Clock

    def new(self, vm_id: str, *, subscription_id: str) -> str:
        """Return a token for the VM *vm_id* that is valid for TOKEN_SECONDS."""
        now = int(self.clock.timestamp())
        claims = {
            "aud": _AUDIENCE,
            "sub": vm_id,
            "sid": subscription_id,
            "iat": now,
            "exp": now + TOKEN_SECONDS,
            "jti": chance.token_hex(8),
        }
        return jwt.encode(claims, _key(self.secrets()[0]), algorithm=_ALGORITHM)

    def vm_id_of(self, token: str) -> str:
        """Return the vmId in *token*, in lowercase. Raise TokenRefused for an invalid token."""
        if len(token) > _MOST_TOKEN_CHARACTERS:
            raise TokenRefused("The token is too long.")
        for secret in self.secrets():
            try:
                claims = jwt.decode(
                    token,
                    _key(secret),
                    algorithms=[_ALGORITHM],
                    audience=_AUDIENCE,
                    # PyJWT would compare the times with the clock of the system.
                    options={"require": ["sub", "iat", "exp"], "verify_exp": False, "verify_iat": False},
                )
                vm_id, issued_at, expires_at = str(uuid.UUID(claims["sub"])), int(claims["iat"]), int(claims["exp"])
            except jwt.InvalidSignatureError:
                continue
            except (jwt.PyJWTError, AttributeError, TypeError, ValueError, RecursionError) as error:
                raise TokenRefused("The token is invalid.") from error
            until = min(expires_at, issued_at + TOKEN_SECONDS)
            if not issued_at - _SKEW_SECONDS <= self.clock.timestamp() < until:
                raise TokenRefused("The token has expired.")
            return vm_id
        raise TokenRefused("The token is invalid.")


def _mac(secret: str, said: bytes) -> bytes:
    return hmac.digest(_key(secret, "challenge"), said, hashlib.sha256)[:_MAC_BYTES]


def _key(secret: str, purpose: str = "agent-token") -> bytes:
    """Return a key for one *purpose*.

    A signature for one purpose is invalid for every other purpose.
    """
    return hmac.digest(secret.encode(), purpose.encode(), hashlib.sha256)
