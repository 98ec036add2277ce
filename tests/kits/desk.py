"""A folder and terminals in which tests run the blocks of a documentation page unchanged.

Only the directory and the ports differ, because the tests of two checkouts might run on one machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import doc_pages

if sys.platform != "win32":
    import pty

#: Generous, for a busy machine.
SECONDS = 60.0


class Desk:
    """The folder *home* next to a `.venv` with the program. *elsewhere* maps words of the page to replacements."""

    def __init__(self, page: str, home: Path, environment: dict[str, str], elsewhere: dict[str, str]) -> None:
        self.home = home
        self.screen = home / "screen"
        self.screen.touch()
        self._page = doc_pages.page(page)
        self._elsewhere = elsewhere
        (home / ".venv").symlink_to(sys.prefix)
        self.environment = {**environment, "PATH": f"{home}/.venv/bin:{os.environ['PATH']}"}
        self._started: list[subprocess.Popen[bytes]] = []

    def text(self, mark: str) -> str:
        """Return the block after *mark* with the replacements."""
        text = doc_pages.marked(self._page, mark)
        for shown, here in self._elsewhere.items():
            text = text.replace(shown, here)
        return text

    def begin(self, script: str) -> subprocess.Popen[bytes]:
        """Start *script* in its own terminal, with output to the screen."""
        with self.screen.open("ab") as screen:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def do(self, script: str, typed: str = "") -> str:
        """Run *script* with the input *typed*, check that it succeeds, and return its output."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.home,
            env=self.environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def show(self, script: str) -> str:
        """Return the output of *script* on a terminal with 80 columns."""
        here, there = pty.openpty()
        environment = {**self.environment, "COLUMNS": "80", "NO_COLOR": "1"}
        subprocess.run(
            ["bash", "-c", script], cwd=self.home, env=environment, stdout=there, timeout=SECONDS, check=True
        )
        os.close(there)
        shown = b""
        with suppress(OSError):  # EIO: end of the output
            while part := os.read(here, 65_536):
                shown += part
        os.close(here)
        return shown.decode().replace("\r\n", "\n")

    def wait_for(self, wanted: str) -> None:
        """Wait until the screen contains the pattern *wanted*."""
        deadline = time.monotonic() + SECONDS
        while not re.search(wanted, self.screen.read_text()):
            assert time.monotonic() < deadline, f"{wanted!r} is not on the screen:\n{self.screen.read_text()}"
            time.sleep(0.1)

    def leave(self) -> None:
        """Stop all started processes."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
