"""Issues and verifies challenges and tokens for agents.

A challenge is a nonce for an attested document. It contains a time and a MAC, so the portal can check its origin and
age without a database. Azure limits a nonce to 32 characters.

A token contains a VM's vmId, a time, and a MAC, and is valid for one hour. It is not a JWT, because the portal verifies
a token in every poll, and PyJWT would increase the CPU time of a poll by 40%.

Any portal process with the secret can verify a challenge or a token. During a rotation, the file contains several
secrets. The portal signs with the first one and accepts all of them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets as chance
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.clock import Clock
from bridge.errors import BridgeError

#: An agent uses a challenge for five minutes. The sixth minute allows for network delays.
CHALLENGE_SECONDS = 360
TOKEN_SECONDS = 3600
#: An attacker who has a token could find a shorter secret by brute force.
LEAST_SECRET_CHARACTERS = 32

_TIME_BYTES, _CHANCE_BYTES, _MAC_BYTES = 4, 4, 12
_CHALLENGE = re.compile("[a-z2-7]{32}")
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
        mac = _mac(self.secrets()[0], "challenge", said)[:_MAC_BYTES]
        return base64.b32encode(said + mac).decode().lower()

    def is_fresh(self, nonce: str) -> bool:
        """Return whether *nonce* is a challenge of this portal that has not expired."""
        if _CHALLENGE.fullmatch(nonce) is None:  # another spelling of a used challenge must not be valid
            return False
        found = base64.b32decode(nonce.upper())
        said, mac = found[: _TIME_BYTES + _CHANCE_BYTES], found[_TIME_BYTES + _CHANCE_BYTES :]
        if not is_one_of(mac, [_mac(secret, "challenge", said)[:_MAC_BYTES] for secret in self.secrets()]):
            return False
        made_at = int.from_bytes(said[:_TIME_BYTES], "big")
        return -_SKEW_SECONDS <= self.clock.timestamp() - made_at <= CHALLENGE_SECONDS


@dataclass(frozen=True)
class AgentTokens:
    """Issues and verifies agent tokens. *secrets* returns the newest secret first."""

    secrets: Callable[[], Sequence[str]]
    clock: Clock

    def new(self, vm_id: str) -> str:
        """Return a token for the VM *vm_id* that is valid for TOKEN_SECONDS."""
        said = f"{vm_id}.{int(self.clock.timestamp())}"
        return f"{said}.{_mac(self.secrets()[0], 'agent-token', said.encode()).hex()}"

    def vm_id_of(self, token: str) -> str:
        """Return the vmId in *token*. Raise TokenRefused for an invalid token."""
        said, _, mac = token.rpartition(".")
        valid = [_mac(secret, "agent-token", said.encode()).hex().encode() for secret in self.secrets()]
        if not is_one_of(mac.encode(), valid):
            raise TokenRefused("The token is invalid.")
        vm_id, _, made_at = said.rpartition(".")
        if not -_SKEW_SECONDS <= self.clock.timestamp() - int(made_at) < TOKEN_SECONDS:
            raise TokenRefused("The token has expired.")
        return vm_id


def _mac(secret: str, purpose: str, said: bytes) -> bytes:
    """Return a MAC that is invalid for every other *purpose*."""
    return hmac.digest(secret.encode(), purpose.encode() + b"\0" + said, hashlib.sha256)


def is_one_of(given: bytes, valid: Sequence[bytes]) -> bool:
    """Return whether *given* is one of *valid*. The response time does not reveal which one."""
    return True in [hmac.compare_digest(given, each) for each in valid]
