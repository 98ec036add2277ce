"""Reads secrets from files and environment variables.

The agent rereads a secret file when it changes, so you can replace a secret without a restart. During a rotation, a
file can contain more than one secret, one per line. Empty lines and lines that start with # are ignored.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from bridge.errors import SecretUnavailable

_T = TypeVar("_T")

MASK = "<secret>"
#: Masking a shorter secret would hide parts of ordinary words.
_SHORTEST_MASKED = 4
_MAX_BYTES = 65_536


class ChangingFile(Generic[_T]):
    """The parsed content of a file. The file is parsed again whenever it changes."""

    def __init__(self, path: Path, parse: Callable[[bytes], _T]) -> None:
        self.path = path
        self._parse = parse
        self._found: tuple[tuple[int, int, int, int], _T] | None = None

    def value(self) -> _T:
        """Return the parsed content of the current file.

        Raise OSError if the file cannot be read, is not a regular file, or is larger than 64 KiB. Exceptions that
        *parse* raises are not caught. After an error, the next call reads the file again.
        """
        last, self._found = self._found, None
        status = self.path.stat()
        # Include st_ctime_ns, because cp -p and rsync -t can keep the time and the size.
        stamp = (status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino)
        if last is None or last[0] != stamp:
            last = stamp, self._parse(self._content(status))
        self._found = last
        return last[1]

    def _content(self, status: os.stat_result) -> bytes:
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise OSError(errno.EINVAL, "it is not a regular file")
        with self.path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise OSError(errno.EFBIG, "it is longer than 64 KiB")
        return content


class Secret:
    """The secret of the setting *key*, from *file* or the environment variable *env*."""

    def __init__(
        self, *, key: str, file: str | None = None, env: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        if file is not None and env is not None:
            raise ValueError(f"{key}_file and {key}_env are both set. Keep one.")
        self._key = key
        self._file = None if file is None else ChangingFile(Path(file), _lines_of)
        self._env = env
        self._environ = environ

    @property
    def is_set(self) -> bool:
        """Return whether the configuration names a file or a variable."""
        return self._file is not None or self._env is not None

    def value(self) -> str | None:
        """Return the first secret, or None if none is configured. Raises SecretUnavailable."""
        return self.values()[0] if self.is_set else None

    def values(self) -> tuple[str, ...]:
        """Return all secrets in the order of the file, with the newest first."""
        if not self.is_set:
            return ()
        if self._file is not None:
            where, lines = f"The file {self._file.path} of {self._key}_file", self._from_file(self._file)
        else:
            where = f"The environment variable {self._env} of {self._key}_env"
            lines = _secrets_in(self._environ.get(self._env or "", ""))
        if not lines:
            raise SecretUnavailable(f"{where} is empty. Put the secret there.")
        return lines

    def _from_file(self, file: ChangingFile[tuple[str, ...]]) -> tuple[str, ...]:
        try:
            return file.value()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            action = "Create it" if isinstance(error, FileNotFoundError) else "Make it readable for the agent"
            raise SecretUnavailable(
                f"The file {file.path} of {self._key}_file cannot be read: {reason}. {action}."
            ) from error


def _lines_of(content: bytes) -> tuple[str, ...]:
    return _secrets_in(content.decode("utf-8"))


def _secrets_in(text: str) -> tuple[str, ...]:
    stripped = (line.strip() for line in text.splitlines())
    return tuple(line for line in stripped if line and not line.startswith("#"))


def masked(text: str, secrets: Iterable[str]) -> str:
    """Return *text* with masked secrets, because a response can quote the request."""
    for secret in sorted((secret for secret in secrets if len(secret) >= _SHORTEST_MASKED), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text
