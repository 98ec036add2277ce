"""Challenges, and agent tokens for one hour. Neither needs a table.

A challenge consists of its time, random bytes, and a MAC of both, in 32 letters and digits (Azure's limit for a nonce).
The secret is sufficient to recognize a challenge and its age. A token is a JWT (HS256) with the VM as its subject.
Every process of the portal with the secret can verify it. A secret file can contain several secrets for rotation, one
per line: the first one signs, and all of them verify.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets as chance
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jwt

from bridge.clock import Clock
from bridge.errors import BridgeError

#: An agent asks for documents with one challenge for five minutes; and a minute for the way.
CHALLENGE_SECONDS = 360
TOKEN_SECONDS = 3600
#: A secret with less chance in it could be guessed from one token.
LEAST_SECRET_CHARACTERS = 32

_TIME_BYTES, _CHANCE_BYTES, _MAC_BYTES = 4, 4, 12
_CHALLENGE = re.compile("[a-z2-7]{32}")
_AUDIENCE = "scheduled-events-portal"
_ALGORITHM = "HS256"
_MOST_TOKEN_CHARACTERS = 2_048
#: A clock of another process of the portal may be ahead of ours.
_SKEW_SECONDS = 60
#: How long a document that was taken is remembered: longer than its challenge counts.
KEPT_SECONDS = CHALLENGE_SECONDS + _SKEW_SECONDS
_MOST_CACHED = 20_000


class TokenRefused(BridgeError):
    """The token is invalid or has expired; the message contains no part of it."""


class Challenges:
    """Makes and verifies challenges; *secrets* returns the portal's secrets, the newest first."""

    def __init__(self, secrets: Callable[[], Sequence[str]], *, clock: Clock) -> None:
        self._secrets = secrets
        self._clock = clock

    def new(self) -> str:
        """Return a new challenge: 32 letters and digits."""
        made_at = int(self._clock.timestamp())
        said = made_at.to_bytes(_TIME_BYTES, "big") + chance.token_bytes(_CHANCE_BYTES)
        made = said + _mac(self._secrets()[0], said)
        return base64.b32encode(made).decode().lower()

    def is_fresh(self, nonce: str) -> bool:
        """Return whether *nonce* is a challenge of this portal that has not expired."""
        if _CHALLENGE.fullmatch(nonce) is None:  # a challenge has one spelling, so a used one cannot come as another
            return False
        found = base64.b32decode(nonce.upper())
        said, mac = found[: _TIME_BYTES + _CHANCE_BYTES], found[_TIME_BYTES + _CHANCE_BYTES :]
        # The time must not depend on the secret that matches.
        if True not in [hmac.compare_digest(mac, _mac(secret, said)) for secret in self._secrets()]:
            return False
        made_at = int.from_bytes(said[:_TIME_BYTES], "big")
        return -_SKEW_SECONDS <= self._clock.timestamp() - made_at <= CHALLENGE_SECONDS


class _Read(NamedTuple):
    """The verified claims of a token."""

    vm_id: str
    issued_at: int
    expires_at: int


class AgentTokens:
    """Issues and verifies agent tokens; *secrets* returns the portal's secrets, the newest first.

    An agent sends its token with every poll, and the verification would double the cost of a poll. Verified tokens are
    therefore cached.
    """

    def __init__(self, secrets: Callable[[], Sequence[str]], *, clock: Clock) -> None:
        self._secrets = secrets
        self._clock = clock

    def new(self, vm_id: str, *, subscription_id: str) -> str:
        """Return a token for the VM *vm_id* that is valid for TOKEN_SECONDS."""
        now = int(self._clock.timestamp())
        claims = {
            "aud": _AUDIENCE,
            "sub": vm_id,
            "sid": subscription_id,
            "iat": now,
            "exp": now + TOKEN_SECONDS,
            "jti": chance.token_hex(8),
        }
        return jwt.encode(claims, _key(self._secrets()[0]), algorithm=_ALGORITHM)

    def vm_id_of(self, token: str) -> str:
        """Return the VM of *token*, in lower case; raise TokenRefused for an invalid token."""
        if len(token) > _MOST_TOKEN_CHARACTERS:
            raise TokenRefused("The token is too long.")
        for secret in self._secrets():
            try:
                read = _verified(token, secret)
            except jwt.InvalidSignatureError:
                continue
            if not read.issued_at - _SKEW_SECONDS <= self._clock.timestamp() < read.expires_at:
                raise TokenRefused("The token has expired.")
            return read.vm_id
        raise TokenRefused("The token is invalid.")


@lru_cache(maxsize=_MOST_CACHED)
def _verified(token: str, secret: str) -> _Read:
    """Return the claims of *token*; raise TokenRefused for a malformed token, InvalidSignatureError for another secret.

    The cache contains no failures, so invalid tokens take no memory.
    """
    try:
        claims = jwt.decode(
            token,
            _key(secret),
            algorithms=[_ALGORITHM],
            audience=_AUDIENCE,
            # The times are looked at by the portal's own clock.
            options={"require": ["sub", "iat", "exp"], "verify_exp": False, "verify_iat": False},
        )
    except jwt.InvalidSignatureError:
        raise
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise TokenRefused("The token is invalid.") from error
    subject, issued_at, expires_at = claims["sub"], claims["iat"], claims["exp"]
    if not (isinstance(subject, str) and isinstance(issued_at, int) and isinstance(expires_at, int)):
        raise TokenRefused("The token is invalid.")
    return _Read(str(uuid.UUID(subject)), issued_at, min(expires_at, issued_at + TOKEN_SECONDS))


def _mac(secret: str, said: bytes) -> bytes:
    return hmac.digest(_key(secret, "challenge"), said, hashlib.sha256)[:_MAC_BYTES]


def _key(secret: str, purpose: str = "agent-token") -> bytes:
    """Return a key for one purpose, so that a signature for one purpose is invalid for another."""
    return hmac.digest(secret.encode(), purpose.encode(), hashlib.sha256)
