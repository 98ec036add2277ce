"""Both ends of the control socket, over which commands use the running agent.

One connection carries one request and one response, both as JSON of at most 1 MiB. Only root and the agent's user may
connect: the socket has mode 0600, and both ends check the user of their peer. On Windows, the socket is a named pipe of
`multiprocessing.connection`. Elsewhere, the framing is the same, but that module, which needs 1 MB, is not imported.

The agent and the commands use the same two locations. The first is ``control.sock`` in the state directory. The second
is ``/run/scheduled-events-bridge/control-HASH.sock``, for a directory that is read-only or whose path is too long. HASH
is a hash of the state directory, because several agents can share /run.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from bridge.agent.requests import AnyRequest, Changed, Decided, Request, Saved, answer_type
from bridge.errors import BridgeError
from bridge.logs import ThrottledLog
from bridge.outbox.lock import is_locked

logger = logging.getLogger(__name__)

A = TypeVar("A")
Connection: TypeAlias = Any
"""A `_SocketConnection`, or on Windows a connection of `multiprocessing.connection`, which has the same methods."""

RUN_DIRECTORY = Path("/run/scheduled-events-bridge")
ANSWER_SECONDS = 5.0
MOST_BYTES = 1024 * 1024
_MOST_PATH_BYTES = 107
_MOST_CONNECTIONS = 16
_RETRY_SECONDS = 0.1


class NoAgent(BridgeError):
    """No agent runs on the state directory."""


class AgentSilent(BridgeError):
    """An agent runs on the state directory, but gives no response."""


class AccessDenied(BridgeError):
    """This user may not use the agent."""


class RequestRefused(BridgeError):
    """The agent cannot do what the request asks for."""


class NotSaved(BridgeError):
    """The agent made the change, but could not save it in time."""


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    pid: int
    error: str | None = None
    answer: msgspec.Raw = msgspec.Raw(b"null")


def addresses(directory: Path) -> list[str]:
    """Return the locations of the socket, the preferred one first."""
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:16]
    if sys.platform == "win32":
        return [rf"\\.\pipe\scheduled-events-bridge-{digest}"]
    paths = (directory.absolute() / "control.sock", RUN_DIRECTORY / f"control-{digest}.sock")
    return [str(path) for path in paths if len(os.fsencode(path)) <= _MOST_PATH_BYTES]


def _text(directory: Path) -> str:
    return os.fsencode(directory.absolute()).decode("utf-8", "replace")


# The agent's end.


class ControlServer:
    """Passes each request on the control socket of *directory* to *ask*, which may raise BridgeError."""

    def __init__(self, directory: Path, ask: Callable[[Request[Any]], msgspec.Struct]) -> None:
        self._directory, self._ask = directory, ask
        self._listener: Any = None
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._decode = msgspec.json.Decoder(AnyRequest).decode
        self._log = ThrottledLog(logger)

    def open(self) -> None:
        """Listen, unless the socket is in place. Called every second, because the directory may be replaced."""
        if isinstance(self._listener, _SocketListener) and not self._listener.is_in_place:
            self.close()
        if self._listener is not None:
            return
        with suppress(OSError):
            RUN_DIRECTORY.mkdir(exist_ok=True)
        problem: Exception | None = None
        for address in addresses(self._directory):
            try:
                self._listener = _listen(address)
                threading.Thread(target=self._serve, args=(self._listener,), name="control", daemon=True).start()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                problem = error
                self.close()
            else:
                self._log.recovered("open", "The control socket is open.")
                return
        self._log.problem("open", logging.WARNING, f"Commands cannot reach this agent: no control socket. {problem}")

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _serve(self, listener: Any) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                if listener is not self._listener:
                    return
                time.sleep(_RETRY_SECONDS)  # no descriptor is free
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(connection,), name="control-answer", daemon=True).start()
            except RuntimeError:
                self._free.release()
                connection.close()

    def _answer(self, connection: Connection) -> None:
        try:
            with closing(connection), suppress(OSError, EOFError):
                uid, _ = _peer(connection)
                if uid not in (None, 0, _own_uid()):
                    return
                if connection.poll(ANSWER_SECONDS):
                    connection.send_bytes(self._response(connection.recv_bytes(MOST_BYTES)))
        finally:
            self._free.release()

    def _response(self, body: bytes) -> bytes:
        response = _Response(directory=_text(self._directory), pid=os.getpid())
        try:
            answer = msgspec.json.encode(self._ask(self._decode(body)))
            response = msgspec.structs.replace(response, answer=msgspec.Raw(answer))
        except (BridgeError, msgspec.MsgspecError) as error:
            response = msgspec.structs.replace(response, error=str(error))
        except Exception as error:
            logger.exception("A request of a command failed.")
            response = msgspec.structs.replace(response, error=f"The agent failed: {error}")
        return msgspec.json.encode(response)


def _listen(address: str) -> Any:
    if sys.platform == "win32":
        from multiprocessing.connection import Listener  # noqa: PLC0415

        return Listener(address)
    return _SocketListener(address)


def _connect(address: str) -> Connection:
    if sys.platform == "win32":
        from multiprocessing.connection import Client  # noqa: PLC0415

        return Client(address)
    connecting = socket.socket(socket.AF_UNIX)
    try:
        connecting.connect(address)
    except OSError:
        connecting.close()
        raise
    return _SocketConnection(connecting)


class _SocketConnection:
    """One connection over a Unix socket. Each read and write ends in time, because a peer may be stopped."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(ANSWER_SECONDS)

    def send_bytes(self, body: bytes) -> None:
        self._socket.sendall(struct.pack("!i", len(body)) + body)

    def recv_bytes(self, most: int) -> bytes:
        (size,) = struct.unpack("!i", self._read(4))
        if not 0 <= size <= most:
            raise OSError(errno.EMSGSIZE, "The message is too long.")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            part = self._socket.recv(size - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    def poll(self, seconds: float) -> bool:
        return bool(select.select([self._socket], [], [], seconds)[0])

    def close(self) -> None:
        self._socket.close()

    @property
    def peer(self) -> tuple[int, int]:
        """Return the user and the process of the peer (Linux)."""
        pid, uid, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return uid, pid


class _SocketListener:
    """A listening Unix socket at *path*, which replaces the socket of an agent that was killed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)  # noqa: PTH108
            self._socket.bind(path)
            os.chmod(path, 0o600)  # noqa: PTH101  # no one can connect before listen()
            self._found = os.lstat(path)
            self._socket.listen(_MOST_CONNECTIONS)
        except OSError:
            self._socket.close()
            raise

    @property
    def is_in_place(self) -> bool:
        """Return whether the socket at the path is this socket."""
        try:
            return os.path.samestat(os.lstat(self._path), self._found)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def accept(self) -> Connection:
        """Return the next connection; raise OSError."""
        return _SocketConnection(self._socket.accept()[0])

    def close(self) -> None:
        """Close the socket, and delete it if it is still in place."""
        with suppress(OSError):
            if self.is_in_place:
                os.unlink(self._path)  # noqa: PTH108
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._socket.close()


# The commands' end.


class ControlClient:
    """Asks the agent that runs on *directory*."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def ask(self, request: Request[A], *, seconds: float = ANSWER_SECONDS) -> A:
        """Return the answer to *request*; a change is saved then.

        Raises NoAgent if no agent runs, AgentSilent if the agent does not respond within *seconds*, AccessDenied if
        this user may not use the agent, RequestRefused with the agent's message, and NotSaved.
        """
        deadline = time.monotonic() + seconds
        answer = self._ask(request, deadline)
        if isinstance(answer, Changed | Decided) and not answer.saved:
            self._wait_saved(deadline)
            answer = msgspec.structs.replace(answer, saved=True)
        return answer

    def _wait_saved(self, deadline: float) -> None:
        while True:
            found = self._ask(Saved(), deadline + 1.0)
            if found.saved:
                return
            if time.monotonic() >= deadline:
                why = found.reason or "The disk is slow."
                raise NotSaved(f"The agent made the change but could not save it yet. {why}")

    def _ask(self, request: Request[A], deadline: float) -> A:
        with closing(self._connect(deadline)) as connection:
            pid = _peer(connection)[1]
            try:
                connection.send_bytes(msgspec.json.encode(request))
                if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                    raise AgentSilent(self._silent(pid))
                response = msgspec.json.decode(connection.recv_bytes(2 * MOST_BYTES), type=_Response)
            except (OSError, EOFError) as error:
                raise AgentSilent(self._silent(pid)) from error
        if response.directory != _text(self._directory):
            raise NoAgent(f"Another agent answers, which runs on {response.directory}.")
        if response.error is not None:
            raise RequestRefused(response.error)
        return msgspec.json.decode(response.answer, type=answer_type(request))

    def _connect(self, deadline: float) -> Connection:
        """Return a connection. While an agent holds the lock and starts, its socket may be missing."""
        while True:
            for connection in self._connections():
                return connection
            is_running = is_locked(self._directory)
            if is_running is None:
                raise AccessDenied(self._denied())
            if not is_running:
                raise NoAgent(f"No agent runs on the state directory {self._directory}.")
            if time.monotonic() >= deadline:
                raise AgentSilent(self._silent(None))
            time.sleep(_RETRY_SECONDS)

    def _connections(self) -> Iterator[Connection]:
        for address in addresses(self._directory):
            try:
                connection = _connect(address)
            except PermissionError:
                raise AccessDenied(self._denied()) from None
            except OSError:
                continue
            uid = _peer(connection)[0]
            if uid in (None, 0, _own_uid(), _owner(self._directory)):
                yield connection
            else:
                connection.close()

    def _silent(self, pid: int | None) -> str:
        process = "" if pid is None else f" (process {pid})"
        return f"The agent{process} on {self._directory} did not respond within {ANSWER_SECONDS:g} s."

    def _denied(self) -> str:
        return (
            f"This user may not use the agent on {self._directory}. Run the command as root, with sudo, or as the "
            "agent's user."
        )


def _peer(connection: Connection) -> tuple[int | None, int | None]:
    """Return the user and the process of the peer, None where the system does not report them."""
    if sys.platform == "linux" and isinstance(connection, _SocketConnection):
        return connection.peer
    return None, None


def _own_uid() -> int | None:
    return None if sys.platform == "win32" else os.geteuid()


def _owner(directory: Path) -> int | None:
    try:
        return directory.stat().st_uid
    except OSError:
        return None
