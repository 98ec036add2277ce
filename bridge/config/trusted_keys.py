"""The public keys that decisions are checked with, each pinned to the approver it speaks for.

A key is a file that a person put on the VM; a token only picks one of them by its name. Files are read again when
they change, so a rotated key needs no restart, and a key that was taken away stops counting at once. Ed25519 only:
one algorithm, nothing to choose, nothing to confuse.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Sequence
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
#: The y of every point of small order (RFC 8032 section 5.1): anybody can sign for such a key, all zeros among them.
_SMALL_ORDER = frozenset({0, 1, _PRIME - 1, _ORDER_EIGHT, _PRIME - _ORDER_EIGHT})


class PublicKey(NamedTuple):
    """A key as it was read from its file."""

    key: Ed25519PublicKey
    sha256: str
    """Of the 32 bytes of the key, hexadecimal: tells one key from another, whatever they are called."""


class TrustedKey:
    """The key called *kid*, which speaks for *approver* and for nobody else."""

    def __init__(self, *, kid: str, approver: str, public_key_file: str | Path) -> None:
        self.kid = kid
        self.approver = approver
        self.public_key_file = Path(public_key_file)
        self._file = ChangingFile(self.public_key_file, bytes)
        self._loaded: tuple[bytes, PublicKey] | None = None

    def __repr__(self) -> str:
        return f"TrustedKey(kid={self.kid!r}, approver={self.approver!r}, public_key_file='{self.public_key_file}')"

    def load(self) -> PublicKey:
        """Return the key as the file has it now.

        Raises KeyUnusable when there is none to be had, and KeyMissing, one of them, when the file is gone.
        """
        try:
            content = self._file.value()
        except FileNotFoundError as error:
            raise KeyMissing(
                f"The public key file {self.public_key_file} of kid '{self.kid}' cannot be read: {error.strerror}. "
                "Make it readable for the agent."
            ) from error
        except OSError as error:
            is_no_key_file = error.errno in (errno.EINVAL, errno.EFBIG)  # no plain file, or far too long for a key
            advice = "Put a public key in PEM there." if is_no_key_file else "Make it readable for the agent."
            raise KeyUnusable(
                f"The public key file {self.public_key_file} of kid '{self.kid}' cannot be read: {error.strerror}. "
                f"{advice}"
            ) from error
        loaded = self._loaded
        if loaded is None or loaded[0] is not content:  # the same object until the file changes
            self._loaded = loaded = content, _public_key(content, self.public_key_file)
        return loaded[1]


def key_mistakes(keys: Sequence[TrustedKey]) -> tuple[str, ...]:
    """Return a sentence for everything wrong with *keys* but their files: names, and one key under two names.

    One key under two approvers would let one person approve for two.
    """
    mistakes = [
        f"kid '{kid}' is there {count} times; every key needs a name of its own."
        for kid, count in Counter(key.kid for key in keys).items()
        if count > 1
    ]
    owners: dict[str, TrustedKey] = {}
    for key in keys:
        mistakes.extend(_name_mistakes(key))
        try:
            first = owners.setdefault(key.load().sha256, key)
        except KeyUnusable:  # no mistake of the configuration: see `unusable_keys`
            continue
        if first is not key and first.kid != key.kid:
            mistakes.append(f"kid '{key.kid}' and kid '{first.kid}' are the same key; give each its own.")
    return tuple(mistakes)


def unusable_keys(keys: Sequence[TrustedKey]) -> tuple[str, ...]:
    """Return a sentence for each of *keys* whose file is gone or holds no key: decisions of that key do not count.

    That is no reason not to start: taking its file away is how a key is revoked.
    """
    found = []
    for key in keys:
        try:
            key.load()
        except KeyUnusable as error:
            found.append(str(error))
    return tuple(found)


def _name_mistakes(key: TrustedKey) -> list[str]:
    mistakes = []
    if not 1 <= len(key.kid) <= MAX_NAME_CHARACTERS or not (key.kid.isascii() and key.kid.isprintable()):
        mistakes.append(f"kid {key.kid[:40]!r} is not 1 to {MAX_NAME_CHARACTERS} printable ASCII characters.")
    if not 1 <= len(key.approver) <= MAX_NAME_CHARACTERS or not key.approver.isprintable():
        mistakes.append(f"approver {key.approver[:40]!r} is not 1 to {MAX_NAME_CHARACTERS} printable characters.")
    return mistakes


def _public_key(pem: bytes, path: Path) -> PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - see the TYPE_CHECKING above
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    if b"PRIVATE KEY-----" in pem:
        raise KeyUnusable(f"{path} holds a private key, which has no business on a VM. Put the public key there.")
    if len(pem) > MAX_KEY_FILE_BYTES or pem.count(b"-----BEGIN ") != 1:
        raise KeyUnusable(
            f"{path} does not hold one public key in PEM (BEGIN PUBLIC KEY). `keygen` writes such a file."
        )
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyUnusable(f"{path} is no public key in PEM (BEGIN PUBLIC KEY). `keygen` writes such a file.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyUnusable(
            f"{path} holds a key of another kind ({type(key).__name__.lstrip('_')}); decisions are signed with "
            "Ed25519 only. `keygen` makes such a pair."
        )
    raw = key.public_bytes_raw()
    if (int.from_bytes(raw, "little") & (2**255 - 1)) % _PRIME in _SMALL_ORDER:
        raise KeyUnusable(f"{path} holds a key for which anybody can sign (small order). `keygen` makes a sound pair.")
    return PublicKey(key, hashlib.sha256(raw).hexdigest())
