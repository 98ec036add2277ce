"""A real agent as a process, and its /metrics as Prometheus gets it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from alert_stories.timeline import Phase, Scrape, parse

POLL_SECONDS = 0.2
_LONG_SECONDS = 30.0
_LOOK_SECONDS = 0.05
#: Between the two scrapes of a stretch: several polls, and enough to see what goes with the clock.
_STRETCH_SECONDS = 1.0
#: An agent whose outbox hangs says so within two.
_SCRAPE_SECONDS = 5.0


class LiveAgent:
    """`run` as a process; `phase` watches it for a moment."""

    def __init__(self, directory: Path, env: Mapping[str, str], *, imds: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.state = directory, directory / "state"
        self._env, self._imds = env, imds
        self.config = directory / "config.toml"
        self._log = directory / "err.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def configure(self, text: str = "", *, top: str = "") -> None:
        """Write the configuration: *text* are further tables, *top* what stands above them."""
        self.config.write_text(
            f'{top}\n[imds]\nendpoint = "{self._imds}"\npoll_interval_seconds = {POLL_SECONDS}\n'
            f'[status]\nlisten = "127.0.0.1:0"\n{text}\n'
        )

    def start(self) -> None:
        """Start it and wait for its listener."""
        seen = len(self.log)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bridge", "run", "--config", str(self.config)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**self._env, "STATE_DIRECTORY": str(self.state)},
                cwd=self.directory,
            )
        self.wait(lambda: '"listen":' in self.log[seen:])
        line = next(line for line in self.log[seen:].splitlines() if '"listen":' in line)
        self._port = int(json.loads(line)["listen"].rpartition(":")[2])

    def watch(self) -> None:
        """Start it, and wait until it has polled: a stretch that begins before would be minutes without a poll."""
        self.start()
        self.wait_for(lambda scrape: scrape.of("last_good_poll_timestamp_seconds"))

    def stop(self) -> None:
        """Stop it as systemd does."""
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(_LONG_SECONDS) == 0, self.log

    def kill(self) -> None:
        """Kill it, if it is there."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def signal(self, name: str) -> None:
        """Send it the signal called *name*."""
        assert self.process is not None
        self.process.send_signal(signal.Signals[name])

    def call(self, *arguments: str) -> None:
        """Run another command beside it."""
        subprocess.run(
            [sys.executable, "-m", "bridge", *arguments, "--config", str(self.config)],
            check=True,
            capture_output=True,
            env={**self._env, "STATE_DIRECTORY": str(self.state)},
            timeout=_LONG_SECONDS,
        )

    @property
    def log(self) -> str:
        """What it said so far."""
        return self._log.read_text() if self._log.exists() else ""

    def scrape(self) -> Scrape:
        """Return /metrics; raise OSError when there is no answer in time, as for Prometheus."""
        url = f"http://127.0.0.1:{self._port}/metrics"
        asked_at = time.time()
        with urllib.request.urlopen(url, timeout=_SCRAPE_SECONDS) as answer:
            text = answer.read().decode()
        return parse(text, (asked_at + time.time()) / 2)

    def wait(self, is_so: Callable[[], object]) -> None:
        """Wait until *is_so*."""
        deadline = time.monotonic() + _LONG_SECONDS
        while not is_so():
            assert self.process is None or self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(_LOOK_SECONDS)

    def wait_for(self, is_so: Callable[[Scrape], object]) -> None:
        """Wait until a scrape is as *is_so* says."""
        self.wait(lambda: is_so(self.scrape()))

    def phase(self, minutes: int, *, meanwhile: Callable[[], object] = lambda: None) -> Phase:
        """Scrape twice, with *meanwhile* in between: as it goes on there, so it does for *minutes*."""
        early = self.scrape()
        meanwhile()
        time.sleep(_STRETCH_SECONDS)
        return Phase(minutes, (early, self.scrape()))
