"""The note that a damaged outbox was set aside and not all of it is in the new one yet.

Between the rename of the damaged file and the commit of what could be read of it lie seconds, for a large one minutes.
An agent that is stopped or killed there would find an empty outbox at its next start, and the backlog in a file that
nobody reads. So the note is written before the rename, names what had been set aside before, and goes with the commit.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from bridge.outbox.database import DATABASE

_NOTE = "salvage.json"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_MOST_BYTES = 1024 * 1024
#: As `database.set_aside` calls them; not their -wal and -shm.
_NAME = re.compile(rf"{re.escape(DATABASE)}\.damaged-[^-]*Z(-\d+)?")


def begin(directory: Path) -> None:
    """Note that a damaged file is about to be set aside; one that is still noted stays so."""
    before = sorted(path.name for path in _set_aside(directory))
    # A disk that refuses the note refuses the new file too: then the old one stays where it is, or in memory.
    with suppress(OSError):
        descriptor = os.open(directory / _NOTE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(before).encode())
            file.flush()
            os.fsync(descriptor)


def end(directory: Path) -> None:
    """Note that all that could be read is in the outbox now."""
    with suppress(OSError):
        (directory / _NOTE).unlink()


def unread(directory: Path) -> list[Path]:
    """Return the damaged files that an agent before this one set aside and did not bring into the outbox, in order."""
    try:
        descriptor = os.open(directory / _NOTE, os.O_RDONLY | _NO_LINK)
        with os.fdopen(descriptor, "rb") as file:
            before = set(json.loads(file.read(_MOST_BYTES)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError):
        before = set()  # cut off: what was set aside at any time is read again, and what is known is not told twice
    return [path for path in _set_aside(directory) if path.name not in before]


def _set_aside(directory: Path) -> list[Path]:
    with suppress(OSError):
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(path for path in found if path.is_file() and not path.is_symlink())
    return []
