"""Who may write to a file: its owner, its group, everybody, and whoever may exchange a directory above it.

The rule is that of sshd for the keys of a user (its StrictModes): the file and every directory above it belong to root
or to a trusted user, and neither the group nor others may write to them. As there, a group of one is no exception: who
is in it can change. An access list that lets somebody else write shows as the group's permission, so it is seen too.

Two directories that everybody may write to are harmless. In one with the sticky bit, such as /tmp, nobody can remove or
rename what is another's, so the owner of what is in it is all that counts. And a ConfigMap of Kubernetes is mounted
like that (drwxrwxrwx) from a directory that only the node's root can reach. A file system that is mounted read-only is
no exception: in a hardened systemd unit all of them are, and everybody else may still write.

Symbolic links are followed step by step, and what holds for a directory holds for the one that each of them is in.
On Windows access lists decide, which are not looked at.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection
from pathlib import Path

if sys.platform != "win32":
    import pwd

_MOST_LINKS = 40
_MOUNTS = Path("/proc/self/mountinfo")
_CONFIG_MAP = b"/volumes/kubernetes.io~configmap/"


def why_writable(path: Path, *, users: Collection[int], mounts: Path = _MOUNTS) -> str | None:
    """Return a sentence that says what others than root and *users* may change, None when they may change nothing.

    *path* may be missing; then what is there of the way to it counts. *mounts* takes the place of /proc/self/mountinfo.
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
                    return f"{path} leads through too many symbolic links."
                target = here.readlink()
                left.extend(reversed(target.parts))
                here = Path(left.pop()) if target.is_absolute() else here.parent
            elif (why := _why(here, found, trusted, mounts, is_end=not left)) is not None:
                return why
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"Nobody can say who may write to {here}: {error.strerror}."
        if not left:
            return None
        here = _step(here, left.pop())


def _step(here: Path, name: str) -> Path:
    return here.parent if name == ".." else here / name


def _why(here: Path, found: os.stat_result, trusted: Collection[int], mounts: Path, *, is_end: bool) -> str | None:
    if found.st_uid not in trusted:
        return f"{here} belongs to {_name(found.st_uid)}. Give it to root or to the agent's user (chown)."
    if not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    is_directory = stat.S_ISDIR(found.st_mode)
    if is_directory and not is_end and found.st_mode & stat.S_ISVTX:
        return None
    if is_directory and _is_config_map(here, mounts):
        return None
    who = "everybody" if found.st_mode & stat.S_IWOTH else "its group"
    mode = stat.S_IMODE(found.st_mode)
    return f"{here} may be written by {who}: its mode is {mode:04o}. Take that away (chmod go-w {here})."


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _is_config_map(here: Path, mounts: Path) -> bool:
    """Return whether Kubernetes has mounted a ConfigMap at *here*: fields 4 and 5 of a line are its root and place."""
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return False
    fields = [line.split(b" ") for line in lines]
    return any(len(each) > 4 and each[4] == os.fsencode(here) and _CONFIG_MAP in each[3] for each in fields)  # noqa: PLR2004
