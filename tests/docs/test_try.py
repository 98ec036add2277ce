"""The page "A first webhook": its files, its commands in order, and the output that the page shows."""

import os
import re
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from desk import SECONDS, Desk
from held_port import held_port

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32" or shutil.which("curl") is None, reason="needs a shell and curl"),
    pytest.mark.skipif(
        not (Path(sys.prefix) / "bin" / "activate").exists(), reason="the tests do not run in a virtual environment"
    ),
]


@pytest.fixture
def desk(tmp_path, agent_env):
    with ExitStack() as stack:
        receiver, simulator, status = (stack.enter_context(held_port()) for _ in range(3))
        elsewhere = {
            "/tmp/bridge-try": str(tmp_path / "try"),
            '"127.0.0.1", 8080': f'"127.0.0.1", {receiver}',
            "127.0.0.1:8080": f"127.0.0.1:{receiver}",
            "127.0.0.1:8169": f"127.0.0.1:{simulator}",
            "127.0.0.1:9464": f"127.0.0.1:{status}",
            # The page uses the default addresses. Twice the speed halves the duration of this test.
            "simulate live-migration --speed 60": f"simulate live-migration --speed 120 --listen 127.0.0.1:{simulator}",
            "[state]": f'[status]\nlisten = "127.0.0.1:{status}"\n\n[state]',
            "receiver.py &\n": "receiver.py &\necho $! >receiver.pid\n",
        }
        desk = Desk("docs/start/first-webhook.md", tmp_path, agent_env, elsewhere)
        yield desk
        desk.leave()


def test_first_webhook_page_produces_the_documented_output(desk):
    enter, work = desk.text("try: enter"), desk.home / "try"
    desk.do(enter)
    for name in ("receiver.py", "try.toml"):
        (work / name).write_text(desk.text(f"file: {name}"))
    first = desk.begin(enter + desk.text("try: run"))
    seen = desk.text("try: seen").splitlines()
    for line in seen:
        desk.wait_for(line)
    lines = desk.screen.read_text().splitlines()
    assert [line for line in lines if line.startswith("webhook: ")] == seen
    assert sum("Freeze of this VM (simulated-vm)" in line for line in lines) == len(seen)

    shown = desk.do(enter + desk.text("try: look"))
    assert "The agent is running and ready." in shown
    assert re.search(r"^webhook +ok +0 .* 3$", shown, re.MULTILINE), shown
    assert [word in shown for word in ("scheduled", "started", "completed")] == [True] * 3
    assert '{"status":"ready","reasons":[]' in shown
    assert 'scheduled_events_bridge_sink_delivered_total{sink="webhook"} 3.0' in shown
    desk.wait_for("webhook: Reboot scheduled")

    os.kill(int((work / "receiver.pid").read_text()), signal.SIGTERM)
    status, *_, announce = desk.text("try: look").splitlines()
    desk.do(f"{enter}{announce}")
    deadline = time.monotonic() + SECONDS
    while "failing" not in (shown := desk.do(enter + status)):
        assert time.monotonic() < deadline, shown
    assert re.search(r"last error .* cannot be reached", shown), shown
    desk.begin(f"{enter}python3 receiver.py")
    desk.wait_for(r"(?s)webhook: Reboot scheduled.*webhook: Reboot scheduled")

    os.killpg(first.pid, signal.SIGINT)  # Ctrl-C. A shell without job control ignores SIGINT in background processes.
    assert first.wait(SECONDS) == 0
    assert "The agent is not running" in desk.do(enter + status)
