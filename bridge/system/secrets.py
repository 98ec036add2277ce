"""Secret: a secret that stands in a file or in the environment, never in the configuration, and never in a message.

A file is read again when it changes, so that a rotated token needs no restart. A file may hold several secrets, one a
line, while an old and a new one are both in use; empty lines and lines that begin with # do not count.
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
#: A shorter text would be masked in the middle of ordinary words.
_SHORTEST_MASKED = 4
_MOST_BYTES = 65_536


class ChangingFile(Generic[_T]):
    """What *parse* makes of the bytes of the file at *path*, made again when the file has changed."""

    def __init__(self, path: Path, parse: Callable[[bytes], _T]) -> None:
        self.path = path
        self._parse = parse
        self._found: tuple[tuple[int, int, int, int], _T] | None = None

    def value(self) -> _T:
        """Return it as the file is now.

        Raises what *parse* raises, and OSError when the file cannot be read, is no plain file or is too long; then the
        file is read again the next time.
        """
        last, self._found = self._found, None
        status = self.path.stat()
        # st_ctime_ns: whoever copies with times (cp -p, rsync -t) may leave the time and the size as they were.
        stamp = (status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino)
        if last is None or last[0] != stamp:
            last = stamp, self._parse(self._content(status))
        self._found = last
        return last[1]

    def _content(self, status: os.stat_result) -> bytes:
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device might never end
            raise OSError(errno.EINVAL, "it is no plain file")
        with self.path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise OSError(errno.EFBIG, "it is longer than 64 KiB")
        return content


class Secret:
    """The secret of the setting *key*, from *file* or from the environment variable *env*; both None: there is none."""

    def __init__(
        self, *, key: str, file: str | None = None, env: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        if file is not None and env is not None:
            raise ValueError(f"{key}_file and {key}_env are both set; keep one")
        self._key = key
        self._file = None if file is None else ChangingFile(Path(file), _lines_of)
        self._env = env
        self._environ = environ

    @property
    def is_set(self) -> bool:
        """Return whether the configuration names a file or a variable."""
        return self._file is not None or self._env is not None

    def value(self) -> str | None:
        """Return the secret, the first of several; None when none is configured.

        Raises SecretUnavailable when the file or the variable is missing or empty: a person must act, and the record
        is sent once they have.
        """
        return self.values()[0] if self.is_set else None

    def values(self) -> tuple[str, ...]:
        """Return every secret, the newest first by the file's order; empty when none is configured."""
        if not self.is_set:
            return ()
        if self._file is not None:
            where, lines = f"The file {self._file.path} of {self._key}_file", self._from_file(self._file)
        else:
            where = f"The environment variable {self._env} of {self._key}_env"
            lines = _meant(self._environ.get(self._env or "", ""))
        if not lines:
            raise SecretUnavailable(f"{where} is empty. Put the secret there.")
        return lines

    def _from_file(self, file: ChangingFile[tuple[str, ...]]) -> tuple[str, ...]:
        try:
            return file.value()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise SecretUnavailable(
                f"The file {file.path} of {self._key}_file cannot be read: {reason}. Make it readable for the agent."
            ) from error


def _lines_of(content: bytes) -> tuple[str, ...]:
    return _meant(content.decode("utf-8"))


def _meant(text: str) -> tuple[str, ...]:
    stripped = (line.strip() for line in text.splitlines())
    return tuple(line for line in stripped if line and not line.startswith("#"))


def masked(text: str, secrets: Iterable[str]) -> str:
    """Return *text* with every one of *secrets* replaced: a peer may echo what it was sent."""
    for secret in sorted((secret for secret in secrets if len(secret) >= _SHORTEST_MASKED), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text
