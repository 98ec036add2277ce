"""Starts the emulator as a process and controls it, for the fixtures of tests and benchmarks."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KITS = Path(__file__).parents[1]
_HUB = "scheduled-events"
_KEY_NAME = "send"
_KEY = "c2VjcmV0LWtleS1vZi10aGUtdGVzdHM="

#: The reason to skip tests of the emulator.
NEEDS = "the emulator needs python-qpid-proton: pip install python-qpid-proton (compiles), or Debian's package"


@dataclass(frozen=True)
class Emulator:
    """A running emulator."""

    ports: dict[str, int]
    hub: str = _HUB
    key: str = _KEY

    def state(self) -> dict[str, Any]:
        """Return the counters, tokens, and events, with decoded bodies."""
        state: dict[str, Any] = self._ask("GET", "/state")
        for event in state["events"]:
            event["body"] = base64.b64decode(event["body"])
        return state

    def faults(self, *kinds: str | dict[str, Any]) -> None:
        """Queue these faults for the next transfers."""
        self._ask("POST", "/faults", [{"kind": kind} if isinstance(kind, str) else kind for kind in kinds])

    def set(self, **settings: Any) -> None:
        """Change fields of the settings."""
        self._ask("POST", "/settings", settings)

    def drop(self) -> None:
        """Reset every connection."""
        self._ask("POST", "/drop", {})

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], within_seconds: float = 10.0) -> dict[str, Any]:
        """Wait until *condition* is true for the state, and return the state."""
        deadline = time.monotonic() + within_seconds
        waiting = threading.Event()
        while not condition(state := self.state()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"The emulator did not reach the state within {within_seconds:g} s: {state}")
            waiting.wait(0.02)
        return state

    def connection_string(self, *, is_tls: bool = False, key: str = _KEY, entity: str = _HUB) -> str:
        """Return a connection string for the TCP port, or for a namespace on the TLS port."""
        endpoint = "sb://127.0.0.1" if is_tls else f"sb://127.0.0.1:{self.ports['amqp']}"
        string = f"Endpoint={endpoint};SharedAccessKeyName={_KEY_NAME};SharedAccessKey={key};EntityPath={entity}"
        return string if is_tls else string + ";UseDevelopmentEmulator=true"

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports['control']}{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


@contextmanager
def started(*, cert_file: str = "", key_file: str = "") -> Iterator[Emulator]:
    """Yield an empty, running emulator. With a certificate, it also serves TLS."""
    argv = ["--hub", _HUB, "--key-name", _KEY_NAME, "--key", _KEY]
    argv += ["--cert", cert_file, "--cert-key", key_file] if cert_file else []
    with running("serve", *argv) as said:
        yield Emulator(json.loads(said))


@contextmanager
def running(module: str, *argv: str) -> Iterator[str]:
    """Run a module of this directory, and yield its first line of output. Closing its standard input stops it."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"eventhubs_emulator.{module}", *argv],
        cwd=_KITS,
        env={**os.environ, "PYTHONPATH": str(_KITS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline()
        finally:
            process.stdin.close()
            process.wait(10)
