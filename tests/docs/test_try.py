"""The newcomer's first ten minutes, as the page has them: its files, its commands in order, what appears.

Only the ports and the directory are others, because the tests of two checkouts may run on one machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import doc_pages
import pytest
from held_port import held_port

TRY = doc_pages.page("docs/start/first-webhook.md")
#: "Within half a minute", and as much again for a machine that does other things too.
SECONDS = 60

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("curl") is None, reason="needs a shell and curl"
)


class Desk:
    """A directory of a newcomer, and what happens on the first terminal."""

    def __init__(self, directory: Path, environment: dict[str, str], ports: list[int]) -> None:
        self.checkout = directory
        self.environment = environment
        self.work = directory / "try"
        self.screen = directory / "screen"
        self.ports = dict(zip(("8080", "8169", "9464"), ports, strict=True))
        self.started: list[subprocess.Popen[bytes]] = []
        (directory / ".venv").symlink_to(sys.prefix)

    def text(self, mark: str) -> str:
        """Return the block after *mark*, for this directory and these ports."""
        text = doc_pages.marked(TRY, mark).replace("/tmp/bridge-try", str(self.work))
        for port, mine in self.ports.items():
            text = re.sub(rf"\b127\.0\.0\.1(:|\", ){port}\b", rf"127.0.0.1\g<1>{mine}", text)
        # What the page leaves at its default has to be said here.
        text = text.replace(
            "simulate live-migration", f"simulate --listen 127.0.0.1:{self.ports['8169']} live-migration"
        )
        return text.replace("[state]", f'[status]\nlisten = "127.0.0.1:{self.ports["9464"]}"\n\n[state]')

    def save(self, name: str) -> None:
        (self.work / name).write_text(self.text(f"file: {name}"))

    def begin(self, commands: str) -> subprocess.Popen[bytes]:
        """Start *commands* in a terminal of their own, whose output goes to the screen."""
        with self.screen.open("ab") as screen:
            process = subprocess.Popen(
                ["bash", "-c", f"{self.text('try: enter')}\n{commands}"],
                cwd=self.checkout,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def do(self, commands: str) -> str:
        """Return what *commands* print in the second terminal; none may fail."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", f"{self.text('try: enter')}\n{commands}"],
            cwd=self.checkout,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_for(self, wanted: str, times: int = 1) -> None:
        """Wait until *wanted* stands on the screen so many *times*."""
        deadline = time.monotonic() + SECONDS
        while self.screen.read_text().count(wanted) < times:
            assert time.monotonic() < deadline, f"{wanted!r} is not on the screen:\n{self.screen.read_text()}"
            time.sleep(0.1)

    def leave(self) -> None:
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait(10)


@pytest.fixture
def desk(tmp_path, agent_env):
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip("the tests do not run in a virtual environment")
    with ExitStack() as stack:
        desk = Desk(tmp_path, agent_env, [stack.enter_context(held_port()) for _ in range(3)])
        yield desk
        desk.leave()


def test_newcomer_gets_a_working_webhook_and_sees_what_the_page_shows(desk):
    desk.do("")
    desk.save("receiver.py")
    desk.save("try.toml")
    run = desk.text("try: run").replace("receiver.py &\n", "receiver.py &\necho $! >receiver.pid\n")
    first = desk.begin(run)
    seen = desk.text("try: seen").splitlines()
    for line in seen:
        desk.wait_for(line)
    lines = desk.screen.read_text().splitlines()
    assert [line for line in lines if line.startswith("webhook: ")] == seen
    assert sum("Freeze of this VM (simulated-vm)" in line for line in lines) == len(seen)

    shown = desk.do(desk.text("try: look"))
    assert "The agent is running and ready." in shown
    assert re.search(r"^webhook +ok +0 .* 3$", shown, re.MULTILINE), shown
    assert [word in shown for word in ("scheduled", "started", "completed")] == [True] * 3
    assert '{"status":"ready","reasons":[]' in shown
    assert 'scheduled_events_bridge_sink_delivered_total{sink="webhook"} 3.0' in shown
    desk.wait_for("webhook: Reboot scheduled")

    os.kill(int((desk.work / "receiver.pid").read_text()), signal.SIGTERM)
    status, *_, announce = desk.text("try: look").splitlines()
    desk.do(announce)
    deadline = time.monotonic() + SECONDS
    while "failing" not in (shown := desk.do(status)):
        assert time.monotonic() < deadline, shown
    assert re.search(r"last error .* cannot be reached", shown), shown
    desk.begin("python3 receiver.py")
    desk.wait_for("webhook: Reboot scheduled", times=2)

    os.killpg(first.pid, signal.SIGINT)  # what Ctrl-C does; the shell has told those in the background to ignore it
    assert first.wait(SECONDS) == 0
    assert "The agent is not running" in desk.do(status)
