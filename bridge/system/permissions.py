"""Detects files that untrusted users can change.

A file is safe if root or a trusted user owns it and all directories above it, and if neither their group nor other
users can write to them. sshd applies the same rule to a user's keys (StrictModes). Symbolic links are followed, and
each directory on the way is checked. A directory to which everyone can write is safe in two cases:

- The directory has the sticky bit, as /tmp has. Only the owner of a file can then remove or rename the file.
- The directory is a ConfigMap of Kubernetes. Only root on the node can reach it.

This module does not check the access control lists of Windows.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection
from pathlib import Path

if sys.platform == "win32":
    import getpass
else:
    import pwd

_MOST_LINKS = 40
_MOUNTS = Path("/proc/self/mountinfo")
_CONFIG_MAP = b"/volumes/kubernetes.io~configmap/"


def why_writable(path: Path, *, users: Collection[int], mounts: Path = _MOUNTS) -> str | None:
    """Return why an untrusted user can change *path*, or None if no untrusted user can.

    The root user and *users* are trusted. If *path* does not exist, the function checks only the parent directories
    that exist. *mounts* is the path of the mount table, which tests replace.
    """
    if sys.platform == "win32":
        return None
    trusted = {0, *users}
    left = list(reversed(path.absolute().parts))
    here, links = Path(left.pop()), 0
    while True:
        try:
            found = os.lstat(here)
            if stat.S_ISLNK(found.st_mode) and found.st_uid in trusted:
                links += 1
                if links > _MOST_LINKS:
                    return f"{path} has too many symbolic links."
                target = here.readlink()
                left.extend(reversed(target.parts))
                here = Path(left.pop()) if target.is_absolute() else here.parent
            elif (why := _why(here, found, trusted, mounts, is_end=not left)) is not None:
                return why
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"The permissions of {here} cannot be read: {error.strerror}."
        if not left:
            return None
        name = left.pop()
        here = here.parent if name == ".." else here / name


def _why(here: Path, found: os.stat_result, trusted: Collection[int], mounts: Path, *, is_end: bool) -> str | None:
    if found.st_uid not in trusted:
        return f"{here} belongs to {user_name(found.st_uid)}. Change its owner to root or the agent's user (chown)."
    if not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    is_directory = stat.S_ISDIR(found.st_mode)
    if is_directory and not is_end and found.st_mode & stat.S_ISVTX:
        return None
    if is_directory and _is_config_map(here, mounts):
        return None
    who = "Every user" if found.st_mode & stat.S_IWOTH else "Its group"
    mode = stat.S_IMODE(found.st_mode)
    return f"{who} can write to {here}: its mode is {mode:04o}. Run `chmod go-w {here}`."


def user_name(uid: int | None = None) -> str:
    """Return the name of the user *uid*, by default the current user, or *uid* if it has none."""
    if sys.platform == "win32":
        return getpass.getuser()
    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name  # getpass trusts the environment
    except KeyError:
        return f"uid {uid}"


def _is_config_map(here: Path, mounts: Path) -> bool:
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return False
    fields = [line.split(b" ") for line in lines]
    return any(len(each) > 4 and each[4] == os.fsencode(here) and _CONFIG_MAP in each[3] for each in fields)  # noqa: PLR2004
