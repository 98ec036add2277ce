"""A plain HTTP server that serves documents, and the agent as a process."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import fork_server
import pytest
from approval_stage import Stage
from fork_server import Process

from bridge.testing import Simulator


class PlainServer(ThreadingHTTPServer):
    """Serves `body` with `status` at any path, or runs `answer`. Counts the served documents."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = b""
        self.status = 200
        self.headers: dict[str, str] = {}
        self.answer: Callable[[_Handler], None] | None = None
        # Without an identity, each first record would wait. Without a name, every event can affect this VM.
        self.identity = (200, b'{"vmId": "AAAA"}')
        self.served = 0
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def show(self, document: object, *, polls: int = 2) -> None:
        """Serve *document*, and wait for *polls* polls, so that the previous document is stored."""
        self.body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.wait_for_polls(polls)

    def wait_for_polls(self, polls: int, timeout_seconds: float = 20) -> None:
        wanted, deadline = self.served + polls, time.monotonic() + timeout_seconds
        while self.served < wanted:
            assert time.monotonic() < deadline, "the agent stopped polling"
            time.sleep(0.02)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PlainServer

    def do_GET(self) -> None:
        is_document = "scheduledevents" in self.path
        if is_document and self.server.answer is not None:
            self.server.served += 1
            self.server.answer(self)
            return
        status, body = (self.server.status, self.server.body) if is_document else self.server.identity
        self.send_response(status)
        for name, value in self.server.headers.items() if is_document else ():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.served += is_document

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def azure() -> Iterator[Simulator]:
    """A simulated Azure with one VM."""
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def imds() -> Iterator[PlainServer]:
    server = PlainServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


class AgentProcess:
    """`run` as a process, with its standard output and standard error in files of *directory*."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.directory, self.env = directory, env
        self.config = directory / "config.toml"
        self.state = directory / "state"
        self.out, self.err = directory / "out.jsonl", directory / "err.log"
        self.process: Process | None = None

    def configure(self, imds_url: str, text: str = "", *, poll_interval_seconds: float = 0.2) -> None:
        self.config.write_text(
            f'[imds]\nendpoint = "{imds_url}"\npoll_interval_seconds = {poll_interval_seconds}\n'
            f'[state]\ndirectory = "{self.state}"\n[status]\nlisten = ""\n{text}\n'
        )

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "bridge", *map(str, arguments)]

    def start(self, *arguments: object) -> AgentProcess:
        with self.out.open("ab") as stdout, self.err.open("ab") as stderr:
            self.process = self.start_command("run", "--config", self.config, *arguments, stdout=stdout, stderr=stderr)
        return self

    def stop(self, *, timeout_seconds: float = 20) -> int:
        """Stop the agent with SIGTERM, like systemd; return the exit code."""
        assert self.process is not None, "it was not started"
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_seconds)

    def kill(self) -> None:
        assert self.process is not None, "it was not started"
        self.process.kill()
        self.process.wait()

    def start_command(self, *arguments: object, stdout: IO[Any] | int, stderr: IO[Any] | int, **env: str) -> Process:
        """Start another command with the additional variables *env*, and return its process."""
        return fork_server.start(*arguments, stdout=stdout, stderr=stderr, env={**self.env, **env}, cwd=self.directory)

    def call(self, *arguments: object) -> tuple[int, str, str]:
        """Run another command; return its exit code, standard output, and standard error."""
        return fork_server.call(*arguments, env=self.env, cwd=self.directory)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    @property
    def transitions(self) -> list[tuple[str, str]]:
        return [(record["transition"], record["evidence"]) for record in self.records]

    @property
    def log(self) -> str:
        return self.err.read_text()

    def wait_for(self, predicate: Callable[[], object], timeout_seconds: float = 20) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not predicate():
            assert self.process is None or self.process.poll() is None, self.log
            assert time.monotonic() < deadline, (self.log, list(self.directory.iterdir()))
            time.sleep(0.02)


@pytest.fixture
def agent(tmp_path: Path, agent_env: dict[str, str]) -> Iterator[AgentProcess]:
    started = AgentProcess(tmp_path, agent_env)
    yield started
    if started.process is not None and started.process.poll() is None:
        started.kill()


@pytest.fixture
def stage(agent: AgentProcess, azure: Simulator, tmp_path: Path) -> Iterator[Stage]:
    """The agent with the simulated Azure and an independent portal."""
    made = Stage(agent, azure, tmp_path)
    yield made
    made.close()
