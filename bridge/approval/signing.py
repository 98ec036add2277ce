"""Creates key pairs and signs decisions, which `decision_token` verifies.

`keygen` creates private key files that only their owner can read, and never overwrites a key file. Like ssh, this
module rejects a private key file that other users can read.
"""

from __future__ import annotations

import json
import os
import stat
import uuid
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bridge.approval.decision_token import (
    ALGORITHM,
    MAX_LIFETIME_SECONDS,
    MAX_REASON_CHARACTERS,
    TOKEN_TYPE,
    ClaimsMalformed,
    RefusedDecision,
    jws,
    read_claims,
    read_header,
)
from bridge.approval.digest import digest
from bridge.errors import SigningFailed
from bridge.events.event import NO_EFFECT, ScheduledEvent
from bridge.events.record import Verdict

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PRIVATE_MODE, _PUBLIC_MODE = 0o600, 0o644
_KEY_FORM = "Ed25519 private key in PEM without a passphrase. `keygen` creates such a key."


class KeyPair(NamedTuple):
    """The two files of a key pair."""

    private_key_file: Path
    public_key_file: Path


def generate_key(private_key_file: str | Path) -> KeyPair:
    """Create an Ed25519 key pair in two new PEM files, and return their paths.

    The private key file has mode 0600. The public key file has the same name with the suffix ``.pub``. On Windows, the
    directory's access control list protects the private key. Raises SigningFailed if either file exists.
    """
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - 8 MB, for two commands
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    private = Path(private_key_file)
    pair = KeyPair(private, private.with_name(private.name + ".pub"))
    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    _write_new(
        pair.private_key_file,
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        mode=_PRIVATE_MODE,
    )
    try:
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        _write_new(pair.public_key_file, public, mode=_PUBLIC_MODE)
    except SigningFailed:
        pair.private_key_file.unlink()
        raise
    return pair


class DecisionSigner:
    """Signs decisions with *private_key_file*. Raises SigningFailed if the file is invalid."""

    def __init__(self, private_key_file: str | Path, *, kid: str, approver: str) -> None:
        self.kid = kid
        self.approver = approver
        self._key = _private_key(Path(private_key_file))

    def sign(
        self,
        vm_id: str,
        event: ScheduledEvent,
        decision: Verdict | str,
        *,
        now: datetime,
        valid_seconds: float = 3600,
        reason: str | None = None,
        jti: str | None = None,
    ) -> str:
        """Return a token with a decision on *event* for the VM *vm_id*.

        The token is issued at *now*, rounded to milliseconds. If *jti* is None, the token gets a new UUID. Raises
        SigningFailed if no agent would accept the token.
        """
        if not 0 < valid_seconds <= MAX_LIFETIME_SECONDS:
            raise SigningFailed(
                f"A decision cannot be valid for {valid_seconds} s. The maximum is {MAX_LIFETIME_SECONDS} s."
            )
        if event.event_id is None:
            raise SigningFailed("The event has no EventId, so no one can approve it.")
        if event.is_advisory:
            raise SigningFailed(NO_EFFECT)
        if reason is not None and (len(reason) > MAX_REASON_CHARACTERS or not reason.isprintable()):
            raise SigningFailed(
                f"The reason must have at most {MAX_REASON_CHARACTERS} printable characters on one line."
            )
        issued_at = _seconds(now.timestamp())
        claims = {
            "iss": self.approver,
            "aud": vm_id,
            "sub": event.event_id,
            "jti": jti or str(uuid.uuid4()),
            "iat": issued_at,
            "exp": _seconds(issued_at + valid_seconds),
            "decision": decision.value if isinstance(decision, Verdict) else decision,
            "event_digest": digest(event),
        }
        if reason is not None:
            claims["reason"] = reason
        payload = json.dumps(claims, separators=(",", ":")).encode()
        return _signed(payload, kid=self.kid, key=self._key)


def _signed(payload: bytes, *, kid: str, key: Ed25519PrivateKey) -> str:
    try:
        read_claims(payload, kid=kid, approver="", key_sha256="")
    except ClaimsMalformed as error:
        raise SigningFailed(f"No agent would accept this decision: {error}. PROTOCOL.md lists the claims.") from error
    token = jws().encode(payload, key, ALGORITHM, headers={"typ": TOKEN_TYPE, "kid": kid})
    try:
        read_header(token)
    except RefusedDecision as error:
        raise SigningFailed(
            f"No agent would accept this decision, because its kid or a claim is too long. {error}"
        ) from error
    return token


def _seconds(moment: float) -> float:
    rounded = round(moment, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def _private_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    try:
        key = load_pem_private_key(_private_bytes(path), password=None)
    except OSError as error:
        raise SigningFailed(f"The private key file {path} cannot be read: {error.strerror}.") from error
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:  # a passphrase causes a TypeError
        raise SigningFailed(f"{path} contains no {_KEY_FORM}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningFailed(f"{path} contains no {_KEY_FORM}")
    return key


def _private_bytes(path: Path) -> bytes:
    """Return a private key file. Raise SigningFailed if other users can read or change it.

    If another user, such as root, owns the file, the file's group is allowed to read it.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if os.name == "posix":
            is_ours = found.st_uid == os.geteuid()
            if mode & (stat.S_IRWXO | (stat.S_IRWXG if is_ours else stat.S_IWGRP)):
                raise SigningFailed(
                    f"Other users can access the private key file {path}, because its mode is {mode:04o}. "
                    "Anyone with the key can sign decisions in your name. "
                    f"If no other user has read the file, run chmod 0600 {path}. Otherwise, create a new key."
                )
        return file.read()


def _write_new(path: Path, content: bytes, *, mode: int) -> None:
    # O_EXCL: never overwrite a key, and never follow a symbolic link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags, mode)
    except FileExistsError as error:
        raise SigningFailed(f"{path} already exists, and a key is never overwritten. Choose another name.") from error
    except OSError as error:
        raise SigningFailed(f"{path} cannot be created: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink()
        raise SigningFailed(f"{path} cannot be written: {error.strerror}.") from error
