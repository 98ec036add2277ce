"""The control socket: a command reaches the running agent, or fails in time with the reason."""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from readable_source import readable_source
from waiting import until

from bridge.agent import control_socket
from bridge.agent.control_requests import retry_records, why_unsaved
from bridge.agent.control_socket import AgentSilent, ControlClient, ControlServer, NoAgent, RequestRefused, addresses
from bridge.errors import OutboxError
from bridge.outbox.lock import DirectoryLock

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has a named pipe")
AS_ROOT = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root acts as another user")
NOBODY = 65534

AGENT = """
import sys
from pathlib import Path
from bridge.agent.control_socket import ControlServer
from bridge.outbox.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
server = ControlServer(Path(sys.argv[1]), lambda name, arguments: None)
server.open()
print("open", flush=True)
sys.stdin.read()
"""
ASK_AS_ANOTHER = """
import multiprocessing.connection, os, sys  # before setuid, because closed_port cannot read every Python
from pathlib import Path
from bridge.agent.control_socket import AccessDenied, ControlClient
from bridge.agent.control_requests import why_unsaved
os.setuid(65534)
try:
    ControlClient(Path(sys.argv[1]), seconds=1).ask(why_unsaved)
except AccessDenied as error:
    print(error)
"""


@pytest.fixture
def tmp_path():
    """Return a directory with a short path, because the path of a socket must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def state(tmp_path, monkeypatch):
    """Return the state directory. Each test uses a separate directory in place of /run."""
    monkeypatch.setattr(control_socket, "RUN_DIRECTORY", tmp_path / "run")
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def serve(state):
    """Return a function that starts an agent's end of the socket and its lock."""
    opened = []

    def start(answer=lambda _name, _arguments: None, directory=state):
        lock, server = DirectoryLock(directory), ControlServer(directory, answer)
        server.open()
        opened.extend([server.close, lock.release])
        return server

    yield start
    for close in opened:
        close()


def asked(directory, seconds=5.0):
    return ControlClient(directory, seconds=seconds).ask(why_unsaved)


def test_command_reaches_the_agent(state, serve):
    serve()
    assert asked(state) is None
    assert (state / "control.sock").stat().st_mode & 0o777 == 0o600


def test_command_without_an_agent_does_not_wait(state):
    began_at = time.monotonic()
    for directory in (state, state / "missing"):
        with pytest.raises(NoAgent, match="No agent runs on the state directory"):
            asked(directory)
    assert time.monotonic() - began_at < 1


def test_stale_socket_is_detected_and_replaced_by_the_next_agent(state, serve):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(state / "control.sock"))
        left.listen()
    with pytest.raises(NoAgent):
        asked(state)
    serve()
    assert asked(state) is None


def test_running_agent_without_a_socket_is_detected(state):
    lock = DirectoryLock(state)
    with pytest.raises(AgentSilent):
        asked(state, seconds=0.3)
    lock.release()


def test_agent_that_does_not_respond_is_named_by_its_process_id(state):
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout.readline() == "open\n"
        assert asked(state) is None
        os.kill(agent.pid, signal.SIGSTOP)
        try:
            began_at = time.monotonic()
            with pytest.raises(AgentSilent, match=rf"\(process {agent.pid}\).* did not respond within"):
                asked(state, seconds=1.0)
            assert time.monotonic() - began_at < 5
        finally:
            agent.kill()
    with pytest.raises(NoAgent):
        asked(state)


@pytest.mark.parametrize("loss", ["unlink", "rmtree", "rename"])
def test_lost_socket_is_created_again(state, serve, tmp_path, loss):
    server = serve()
    if loss == "unlink":
        (state / "control.sock").unlink()
    else:
        shutil.rmtree(state) if loss == "rmtree" else state.rename(tmp_path / "aside")
        state.mkdir()
    server.open()
    assert asked(state) is None


def test_socket_of_a_directory_with_a_long_path_is_in_run(tmp_path, state, serve):
    long = state / ("d" * 60) / ("e" * 60)
    long.mkdir(parents=True)
    assert len(addresses(long)) == 1
    assert not (tmp_path / "run").exists()
    serve(directory=long)
    serve(lambda _name, _arguments: pytest.fail("the other agent was asked"))
    assert asked(long) is None
    assert list((tmp_path / "run").iterdir())


@AS_ROOT
def test_other_users_are_denied(state, serve):
    serve()
    asking = [sys.executable, "-c", ASK_AS_ANOTHER, str(state)]
    env = {**os.environ, "PYTHONPATH": readable_source()}
    said = subprocess.run(asking, capture_output=True, text=True, check=True, timeout=30, env=env, cwd="/").stdout
    assert "Run the command as root, with sudo" in said


@AS_ROOT
def test_agent_rejects_other_users_even_if_the_mode_allows_access(state, serve):
    answered = []
    serve(lambda name, _arguments: answered.append(name))
    (state / "control.sock").chmod(0o666)
    child = os.fork()
    if child == 0:
        os.chdir(state)  # before setuid removes the permission
        os.setuid(NOBODY)
        try:
            with Client("control.sock") as connection:
                connection.send_bytes(b'{"name":"why_unsaved","arguments":{}}')
                connection.recv_bytes()
        except (OSError, EOFError):
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert answered == []


@AS_ROOT
def test_command_rejects_a_socket_of_another_user(state, tmp_path):
    (tmp_path / "run").mkdir()
    state.chmod(0o777)
    child = os.fork()
    if child == 0:
        os.chdir(state)
        os.setuid(NOBODY)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("control.sock")
        listening.listen()
        time.sleep(60)
        os._exit(0)
    try:
        until((state / "control.sock").exists)
        with pytest.raises(NoAgent):
            asked(state)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_refused_request_has_the_message_of_the_agent(state, serve):
    def refuse(_name, _arguments):
        raise OutboxError("Unknown sink 'x'.")

    serve(refuse)
    with pytest.raises(RequestRefused, match=r"Unknown sink 'x'\."):
        asked(state)


def test_failure_in_the_agent_is_logged_and_reported(state, serve, caplog):
    serve(lambda _name, _arguments: 1 / 0)
    with pytest.raises(RequestRefused, match="division by zero"):
        asked(state)
    assert "ZeroDivisionError" in caplog.text


def test_request_above_the_limit_ends_the_connection(state, serve):
    serve()
    with Client(str(state / "control.sock")) as connection:
        os.write(connection.fileno(), struct.pack("!i", 2**20 + 1))
        with pytest.raises((OSError, EOFError)):
            connection.recv_bytes()
    assert asked(state) is None


def test_change_that_cannot_be_saved_is_reported_with_the_reason(state, serve):
    def answer(name, _arguments):
        if name == "why_unsaved":
            time.sleep(0.1)
            return "The disk is full."
        return 3

    serve(answer)
    with pytest.raises(OutboxError, match=r"could not save it yet\. The disk is full\."):
        ControlClient(state, seconds=0.5).change(retry_records)
