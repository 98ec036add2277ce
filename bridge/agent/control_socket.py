"""The control socket, which connects commands to the running agent.

Each connection carries one request and one response, in JSON. `bridge.agent.control_requests` defines the requests.

Only root and the user that runs the agent can connect, because the socket has mode 0600. On Linux, the agent and the
command also check each other's user ID. On Windows, the agent uses a named pipe.

The agent creates ``control.sock`` in the state directory. If this directory is read-only or its path is too long, the
agent uses ``/run/scheduled-events-bridge/control-HASH.sock``, where HASH is a hash of the path. Commands try both.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import msgspec

from bridge.agent.control_requests import Source, why_unsaved
from bridge.errors import BridgeError, OutboxError
from bridge.health.readiness import directory_text
from bridge.logs import ThrottledLog
from bridge.outbox.lock import is_locked

if TYPE_CHECKING:  # an agent imports multiprocessing, which takes half a MiB, when a command connects
    from multiprocessing.connection import Connection, Listener

logger = logging.getLogger(__name__)

P = ParamSpec("P")
A = TypeVar("A")

RUN_DIRECTORY = Path("/run/scheduled-events-bridge")
ANSWER_SECONDS = 5.0
MOST_BYTES = 1024 * 1024
_MOST_PATH_BYTES = 107
_MOST_WAITING = 16
_RETRY_SECONDS = 0.1


class NoAgent(BridgeError):
    """No agent runs on the state directory."""


class AgentSilent(BridgeError):
    """An agent runs on the state directory, but does not respond."""


class AccessDenied(BridgeError):
    """This user is not allowed to use the agent."""


class RequestRefused(BridgeError):
    """The agent cannot process the request."""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, msgspec.Raw]


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    error: str | None = None
    answer: msgspec.Raw = msgspec.Raw(b"null")


def addresses(directory: Path) -> list[str]:
    """Return the possible locations of the socket in the order of preference."""
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:16]
    if sys.platform == "win32":
        return [rf"\\.\pipe\scheduled-events-bridge-{digest}"]
    paths = (directory.absolute() / "control.sock", RUN_DIRECTORY / f"control-{digest}.sock")
    return [str(path) for path in paths if len(os.fsencode(path)) <= _MOST_PATH_BYTES]


# The agent's side of the socket.


class ControlServer:
    """Accepts connections on the control socket. *answer* handles each request."""

    def __init__(self, directory: Path, answer: Callable[[str, dict[str, msgspec.Raw]], object]) -> None:
        self._directory, self._answer_to = directory, answer
        self._listener: Listener | _UnixListener | None = None
        self._log = ThrottledLog(logger)

    def open(self) -> None:
        """Open the socket if it is missing, for example because the state directory was replaced."""
        if isinstance(self._listener, _UnixListener) and not self._listener.is_in_place:
            self.close()
        if self._listener is not None:
            return
        problem: Exception | None = None
        for address in addresses(self._directory):
            try:
                if Path(address).parent == RUN_DIRECTORY:
                    RUN_DIRECTORY.mkdir(exist_ok=True)
                self._listen(address)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                problem = error
                self.close()
            else:
                self._log.recovered("open", "The control socket is open.")
                return
        self._log.problem(
            "open",
            logging.WARNING,
            f"Commands cannot reach this agent, because the control socket cannot be opened. {problem}",
        )

    def _listen(self, address: str) -> None:
        listener: Listener | _UnixListener
        if sys.platform == "win32":
            from multiprocessing.connection import Listener  # noqa: PLC0415

            listener = Listener(address)
        else:
            listener = _UnixListener(address)
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), name="control", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and delete the socket. A second call has no effect."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _serve(self, listener: Listener | _UnixListener) -> None:
        while listener is self._listener:
            try:
                connection = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), name="control-answer", daemon=True).start()
            except (OSError, RuntimeError, ImportError):  # no free descriptor or thread, or a closed listener
                time.sleep(_RETRY_SECONDS)

    def _answer(self, connection: Connection[Any, Any]) -> None:
        with closing(connection), suppress(OSError, EOFError):
            _peer(connection)
            if connection.poll(ANSWER_SECONDS):
                connection.send_bytes(msgspec.json.encode(self._response(connection.recv_bytes(MOST_BYTES))))

    def _response(self, body: bytes) -> _Response:
        directory = directory_text(self._directory)
        try:
            request = msgspec.json.decode(body, type=_Request)
            found = msgspec.json.encode(self._answer_to(request.name, request.arguments))
        except (BridgeError, msgspec.MsgspecError) as error:
            return _Response(directory=directory, error=str(error))
        except Exception as error:
            logger.exception("A request from a command failed.")
            return _Response(directory=directory, error=f"The agent failed: {error}")
        return _Response(directory=directory, answer=msgspec.Raw(found))


class _UnixListener:
    """Listens on a Unix socket, and replaces the socket file that a killed agent left behind.

    Unlike this class, the standard library's `Listener` deletes its socket file at exit even if another agent owns it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._path.chmod(0o600)  # no one can connect before listen()
        self._found = self._path.lstat()
        self._socket.listen(_MOST_WAITING)

    @property
    def is_in_place(self) -> bool:
        """Return whether the file at the path is still this socket."""
        try:
            return os.path.samestat(self._path.lstat(), self._found)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def accept(self) -> Connection[Any, Any]:
        """Wait for the next connection, and return it. Raises OSError."""
        accepted, _ = self._socket.accept()
        from multiprocessing.connection import Connection  # noqa: PLC0415

        return Connection(accepted.detach())

    def close(self) -> None:
        """Close the socket. Delete the file unless it was replaced."""
        with suppress(OSError):
            if self.is_in_place:
                self._path.unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._socket.close()


# The commands' side of the socket.


class ControlClient:
    """Sends requests to the agent that uses the state directory *directory*.

    Each request fails if the agent does not respond within *seconds*.
    """

    def __init__(self, directory: Path, *, seconds: float = ANSWER_SECONDS) -> None:
        self._directory, self._seconds = directory, seconds

    def ask(self, request: Callable[Concatenate[Source, P], A], /, *_: P.args, **arguments: P.kwargs) -> A:
        """Send *request*, a function of `control_requests`, and return the response.

        Raises NoAgent, AgentSilent, AccessDenied, or RequestRefused.
        """
        deadline = time.monotonic() + self._seconds
        body = msgspec.json.encode({"name": request.__name__, "arguments": arguments})
        connection, pid = self._connect(deadline)
        with closing(connection):
            try:
                connection.send_bytes(body)
                if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                    raise AgentSilent(self._silent(pid))
                response = msgspec.json.decode(connection.recv_bytes(2 * MOST_BYTES), type=_Response)
            except (OSError, EOFError) as error:
                raise AgentSilent(self._silent(pid)) from error
        if response.directory != directory_text(self._directory):
            raise NoAgent(f"The control socket belongs to another agent, which runs on {response.directory}.")
        if response.error is not None:
            raise RequestRefused(response.error)
        found: A = msgspec.json.decode(response.answer, type=get_type_hints(request)["return"])
        return found

    def change(self, request: Callable[Concatenate[Source, P], A], /, *args: P.args, **arguments: P.kwargs) -> A:
        """Send *request*, and return the response after the agent has saved the change.

        Raises OutboxError if the agent does not save the change within the time limit of this client (by default, 5 s).
        """
        deadline = time.monotonic() + self._seconds
        found = self.ask(request, *args, **arguments)
        while (why := self.ask(why_unsaved)) is not None:
            if time.monotonic() >= deadline:
                raise OutboxError(f"The agent made the change but could not save it yet. {why}")
        return found

    def _connect(self, deadline: float) -> tuple[Connection[Any, Any], int | None]:
        """Return a connection and the agent's process ID, if known.

        If an agent has locked the directory but is not listening on its socket yet, the method waits until it listens.
        """
        from multiprocessing.connection import Client  # noqa: PLC0415

        while True:
            for address in addresses(self._directory):
                try:
                    connection = Client(address)
                except PermissionError:
                    raise AccessDenied(self._denied()) from None
                except OSError:
                    continue
                with suppress(PermissionError):
                    return connection, _peer(connection, self._directory)
                connection.close()
            is_running = is_locked(self._directory)
            if is_running is None:
                raise AccessDenied(self._denied())
            if not is_running:
                raise NoAgent(f"No agent runs on the state directory {self._directory}.")
            if time.monotonic() >= deadline:
                raise AgentSilent(self._silent(None))
            time.sleep(_RETRY_SECONDS)

    def _silent(self, pid: int | None) -> str:
        process = "" if pid is None else f" (process {pid})"
        return f"The agent{process} that uses {self._directory} did not respond within {ANSWER_SECONDS:g} s."

    def _denied(self) -> str:
        return (
            f"This user may not access an agent of {self._directory}. Run the command as root, with sudo, or as the "
            "agent's user."
        )


def _peer(connection: Connection[Any, Any], directory: Path | None = None) -> int | None:
    """Set the timeouts of *connection*, check its peer, and return the process ID of the peer.

    On Linux, the function raises PermissionError unless the peer process belongs to root, this user, or the owner of
    *directory*. On other systems, it does nothing and returns None.
    """
    if sys.platform != "linux":
        return None
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(ANSWER_SECONDS), 0))
        pid, uid = struct.unpack("iI", same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 8))
    trusted = {0, os.geteuid()}
    if directory is not None:
        with suppress(OSError):
            trusted.add(directory.stat().st_uid)
    if uid not in trusted:
        raise PermissionError(f"User {uid} is not trusted.")
    return int(pid)
