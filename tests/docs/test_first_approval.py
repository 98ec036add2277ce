"""The first approval, as its page has it: its file, its commands in order, and that Azure is told."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import doc_pages
import pytest

PAGE = doc_pages.page("docs/start/first-approval.md")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def desk(tmp_path, agent_env):
    """The page's folder: a shell that runs the page's lines with other ports, in another directory."""
    ports = {"8169": _free_port(), "9464": _free_port()}
    started = []

    def here(text):
        text = text.replace("/tmp/bridge-approval", str(tmp_path))
        for shown, real in ports.items():
            text = text.replace(shown, str(real))
        return text

    [(name, configuration)] = re.findall(r"<!-- file: (\S+) -->\n```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / name).write_text(here(configuration) + f'\n[status]\nlisten = "127.0.0.1:{ports["9464"]}"\n')
    env = {**agent_env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def shell(mark, **options):
        script = here(doc_pages.marked(PAGE, f"approval: {mark}"))
        # The simulator's port is not the usual one, so it is said.
        script = script.replace("simulate quiet", f"simulate quiet --listen 127.0.0.1:{ports['8169']}")
        if options:
            process = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=env, start_new_session=True, **options)
            started.append(process)
            return process
        return subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    yield shell, tmp_path
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(words, log, seconds=60):
    ends = time.monotonic() + seconds
    while words not in log.read_text():
        assert time.monotonic() < ends, f"{words!r} did not come:\n{log.read_text()}"
        time.sleep(0.1)


def test_a_newcomer_approves_an_event_and_sees_it_start(desk):
    shell, folder = desk
    log = folder / "log"
    with log.open("wb") as out:
        shell("run", stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    _wait_for("is running", log)
    announced = shell("announce")
    assert announced.returncode == 0, announced.stderr
    _wait_for(" scheduled: Reboot", log)
    approved = shell("approve")
    assert approved.returncode == 0, approved.stderr
    _wait_for(" approved: Reboot", log)
    _wait_for(" started: Reboot", log)
