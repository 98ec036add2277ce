"""Secrets stand in files or in the environment, never in the configuration, and never in a message.

A file is read again when it changes, so that a rotated token needs no restart. A file may hold several secrets, one a
line, while an old and a new one are both in use; empty lines and lines that begin with # do not count.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from bridge.errors import DeliveryFailed

MASK = "<secret>"
#: A shorter text would be masked in the middle of ordinary words.
_SHORTEST_MASKED = 4
_MOST_BYTES = 65_536


class Secret:
    """The secret of the setting *key*, from *file* or from the environment variable *env*; both null: there is none."""

    def __init__(
        self, *, key: str, file: str | None = None, env: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        if file is not None and env is not None:
            raise ValueError(f"{key}_file and {key}_env are both set; keep one")
        self._key = key
        self._path = None if file is None else Path(file)
        self._env = env
        self._environ = environ
        self._stamp: tuple[int, int, int] | None = None
        self._lines: tuple[str, ...] = ()

    @property
    def is_set(self) -> bool:
        """Return whether the configuration names a file or a variable."""
        return self._path is not None or self._env is not None

    def value(self) -> str | None:
        """Return the secret, the first of several; null when none is configured.

        Raises DeliveryFailed when the file or the variable is missing or empty: a person must act, and the record
        is sent once they have.
        """
        return self.values()[0] if self.is_set else None

    def values(self) -> tuple[str, ...]:
        """Return every secret, the newest first by the file's order; empty when none is configured."""
        if not self.is_set:
            return ()
        lines = self._from_file(self._path) if self._path is not None else self._from_environment()
        if not lines:
            where = f"The environment variable {self._env} of {self._key}_env"
            if self._path is not None:
                where = f"The file {self._path} of {self._key}_file"
            raise DeliveryFailed(f"{where} is empty. Put the secret there.", needs_attention=True)
        return lines

    def _from_environment(self) -> tuple[str, ...]:
        return _meant(self._environ.get(self._env or "", "").splitlines())

    def _from_file(self, path: Path) -> tuple[str, ...]:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self._lines = _meant(_text_of(path, status).splitlines())
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise DeliveryFailed(
                f"The file {path} of {self._key}_file cannot be read: {reason}. Make it readable for the agent.",
                needs_attention=True,
            ) from error
        return self._lines


def _text_of(path: Path, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device might never end
        raise OSError(errno.EINVAL, "it is no plain file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(errno.EFBIG, "it is longer than 64 KiB")
    return content.decode("utf-8")


def _meant(lines: Iterable[str]) -> tuple[str, ...]:
    stripped = (line.strip() for line in lines)
    return tuple(line for line in stripped if line and not line.startswith("#"))


def masked(text: str, secrets: Iterable[str]) -> str:
    """Return *text* with every one of *secrets* replaced: a peer may echo what it was sent."""
    for secret in sorted((secret for secret in secrets if len(secret) >= _SHORTEST_MASKED), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text
