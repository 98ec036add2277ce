"""Loads the public keys that verify decisions. Each key belongs to one approver.

A token contains only the name of its key, so an administrator must copy each key file to the VM. The agent rereads a
key file when it changes, so a key can be replaced without a restart. To revoke a key, delete its file. Ed25519 is the
only supported algorithm.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import KeyMissing, KeyUnusable
from bridge.system.secrets import ChangingFile

if TYPE_CHECKING:  # cryptography costs 8 MB of memory, and most agents approve nothing
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAX_KEY_FILE_BYTES = 16 * 1024
MAX_NAME_CHARACTERS = 128

_PRIME = 2**255 - 19
_ORDER_EIGHT = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
#: The y coordinates of all points of small order (RFC 8032 section 5.1). Anyone can sign for such a key.
_SMALL_ORDER = frozenset({0, 1, _PRIME - 1, _ORDER_EIGHT, _PRIME - _ORDER_EIGHT})


class PublicKey(NamedTuple):
    """A public key from a file."""

    key: Ed25519PublicKey
    sha256: str
    """The SHA-256 digest of the 32 bytes of the key in hexadecimal, which identifies the key under any name."""


class TrustedKey:
    """The trusted public key *kid*, which belongs to *approver*."""

    def __init__(self, *, kid: str, approver: str, public_key_file: str | Path) -> None:
        self.kid = kid
        self.approver = approver
        self.public_key_file = Path(public_key_file)
        self._file = ChangingFile(self.public_key_file, partial(_public_key, path=self.public_key_file))

    def load(self) -> PublicKey:
        """Return the current key. Raises KeyUnusable, or KeyMissing if the file does not exist."""
        try:
            return self._file.value()
        except OSError as error:
            kind = KeyMissing if isinstance(error, FileNotFoundError) else KeyUnusable
            raise kind(
                f"The public key file {self.public_key_file} of kid '{self.kid}' cannot be read: {error.strerror}. "
                "Put a public key in PEM there, and give the agent read access to the file."
            ) from error


def key_mistakes(keys: Sequence[TrustedKey]) -> tuple[str, ...]:
    """Return a sentence for each invalid name in *keys*, and for each key with two names.

    Without this check, a person whose key has two names could approve an event as two people.
    """
    mistakes = [
        f"kid '{kid}' occurs {count} times. Give each key a unique name."
        for kid, count in Counter(key.kid for key in keys).items()
        if count > 1
    ]
    owners: dict[str, TrustedKey] = {}
    for key in keys:
        mistakes.extend(name_mistakes(kid=key.kid, approver=key.approver))
        try:
            first = owners.setdefault(key.load().sha256, key)
        except KeyUnusable:  # `unusable_keys` reports it
            continue
        if first is not key and first.kid != key.kid:
            mistakes.append(f"kid '{key.kid}' and kid '{first.kid}' are the same key. Use different keys.")
    return tuple(mistakes)


def unusable_keys(keys: Sequence[TrustedKey]) -> tuple[str, ...]:
    """Return a sentence for each unusable key file. Decisions with such a key do not count."""
    found = []
    for key in keys:
        try:
            key.load()
        except KeyUnusable as error:
            found.append(str(error))
    return tuple(found)


def name_mistakes(*, kid: str, approver: str) -> list[str]:
    """Return a sentence for each invalid name."""
    mistakes = []
    if not 1 <= len(kid) <= MAX_NAME_CHARACTERS or not (kid.isascii() and kid.isprintable()):
        mistakes.append(f"kid {kid[:40]!r} is not 1 to {MAX_NAME_CHARACTERS} printable ASCII characters.")
    if not 1 <= len(approver) <= MAX_NAME_CHARACTERS or not approver.isprintable():
        mistakes.append(f"approver {approver[:40]!r} is not 1 to {MAX_NAME_CHARACTERS} printable characters.")
    return mistakes


def _public_key(pem: bytes, *, path: Path) -> PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - see the TYPE_CHECKING above
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    if b"PRIVATE KEY-----" in pem:
        raise KeyUnusable(
            f"{path} contains a private key. Put the public key there, and remove the private key from this VM."
        )
    if len(pem) > MAX_KEY_FILE_BYTES or pem.count(b"-----BEGIN ") != 1:
        raise KeyUnusable(
            f"{path} does not contain exactly one public key in PEM (BEGIN PUBLIC KEY). `keygen` writes such a file."
        )
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyUnusable(
            f"{path} is not a public key in PEM (BEGIN PUBLIC KEY). `keygen` writes such a file."
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyUnusable(
            f"{path} contains a key of another kind ({type(key).__name__.lstrip('_')}). Decisions need Ed25519. "
            "`keygen` creates such a pair."
        )
    raw = key.public_bytes_raw()
    if (int.from_bytes(raw, "little") & (2**255 - 1)) % _PRIME in _SMALL_ORDER:
        raise KeyUnusable(
            f"{path} contains a weak key (small order), for which anyone can sign. `keygen` creates a secure pair."
        )
    return PublicKey(key, hashlib.sha256(raw).hexdigest())
