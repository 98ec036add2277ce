"""Connects a command to the running agent or, if none is running, to the outbox on disk.

Only the process that holds the lock on the state directory can write to the outbox. If no agent is running, a command
that changes the outbox takes the lock. If root runs the command, it first switches to the outbox's owner, because the
agent cannot use files that belong to root.
"""

from __future__ import annotations

import multiprocessing.connection  # noqa: F401  # before a command gives up the rights of root
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from bridge.agent.control_requests import Source
from bridge.agent.control_socket import AccessDenied, ControlClient, NoAgent
from bridge.config.loader import service_directory
from bridge.errors import OutboxError, StateDirectoryError
from bridge.system.permissions import user_name

P = ParamSpec("P")
A = TypeVar("A")

LOCK_SECONDS = 5.0
LOAD_SECONDS = 60.0
SAVE_SECONDS = 5.0
_UNIT = "systemd/system/scheduled-events-bridge.service"
#: Commands never evict records. The agent applies the configured limits at its next startup.
_NO_LIMIT = 2**62


class Reader:
    """Reads from the running agent, or from the outbox on disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._client = ControlClient(directory)
        self._stored: Source | None = None

    def ask(self, request: Callable[Concatenate[Source, P], A], /, *args: P.args, **arguments: P.kwargs) -> A:
        """Run *request*, a function in `bridge.agent.control_requests`, and return its result."""
        try:
            answer = self._client.ask(request, *args, **arguments)
        except NoAgent:
            with _as_owner(self._directory):
                self._stored = self._stored or Source(self._directory)
                return request(self._stored, *args, **arguments)
        self._stored = None
        return answer


def change(directory: Path, request: Callable[Concatenate[Source, P], A], /, *args: P.args, **arguments: P.kwargs) -> A:
    """Run *request*, which changes the outbox. Save the change, and then return the result."""
    try:
        return ControlClient(directory).change(request, *args, **arguments)
    except NoAgent:
        with _opened(directory) as source:
            return request(source, *args, **arguments)


@contextmanager
def _opened(directory: Path) -> Iterator[Source]:
    from bridge.outbox.lock import DirectoryLock  # noqa: PLC0415
    from bridge.outbox.outbox import Outbox  # noqa: PLC0415

    with _as_owner(directory):
        try:
            lock = DirectoryLock(directory, wait_seconds=LOCK_SECONDS)
        except StateDirectoryError as error:
            raise OutboxError(str(error)) from error
        try:
            outbox = Outbox(
                directory,
                max_bytes=_NO_LIMIT,
                max_pending_bytes=_NO_LIMIT,
                keep_delivered_seconds=float(_NO_LIMIT),
                claim=lock.claim,
            )
            try:
                if not outbox.wait_loaded(LOAD_SECONDS):
                    raise OutboxError(f"The outbox in {directory} could not be read within {LOAD_SECONDS:g} s.")
                yield Source(directory, outbox)
            finally:
                is_saved = outbox.close(SAVE_SECONDS)
            if not is_saved:
                raise OutboxError(f"The change could not be saved: {outbox.saver.behind_reason or 'the disk is slow.'}")
        finally:
            lock.release()


@contextmanager
def _as_owner(directory: Path) -> Iterator[None]:
    owner = _owner(directory)
    if sys.platform == "win32" or os.geteuid() == owner.st_uid:
        yield
        return
    if os.geteuid() != 0:
        raise AccessDenied(
            f"The outbox in {directory} belongs to {user_name(owner.st_uid)}. Run the command as root, with sudo, or "
            "as that user."
        )
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(os.getgid())


def _owner(directory: Path) -> os.stat_result:
    from bridge.outbox.database import generations  # noqa: PLC0415

    try:
        files = generations(directory)
        if not files:
            raise OutboxError(f"The state directory {directory} contains no outbox. {advice(directory)}")
        found = directory.stat()
        # Root can own the directory, for example a Kubernetes volume to which the agent's group can write.
        return found if found.st_uid else next(iter(files.values())).stat()
    except PermissionError as error:
        raise AccessDenied(
            f"This user cannot read the state directory {directory}. Run the command as root, with sudo, or as the "
            "agent's user."
        ) from error
    except OSError as error:
        raise OutboxError(f"The state directory {directory} cannot be read: {error.strerror or error}.") from error


def advice(directory: Path) -> str:
    """Return advice if *directory* has no running agent or contains no outbox."""
    service = service_directory()
    # Use lexists, because systemd creates a link into a directory that only root can open.
    if service != directory and os.path.lexists(service):
        may_open = os.access(service, os.R_OK | os.X_OK)
        how = f"Use --state-directory {service}." if may_open else "Run the command as root, with sudo."
        return (
            f"The default state directory of the service is {service}. {how} If the service does not run, see its "
            "journal."
        )
    is_service = any(Path(root, _UNIT).exists() for root in ("/etc", "/usr/lib", "/lib"))
    how = "the service with `systemctl start scheduled-events-bridge`" if is_service else "the agent with `run`"
    return f"Start {how}, or use --state-directory or --config."
