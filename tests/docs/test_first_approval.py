"""Runs the page "First approval": the file, the commands in order, and the approval at Azure."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from desk import Desk
from held_port import held_port

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs a shell"),
    pytest.mark.skipif(
        not (Path(sys.prefix) / "bin" / "activate").exists(), reason="the tests do not run in a virtual environment"
    ),
]


@pytest.fixture
def desk(tmp_path, agent_env):
    with ExitStack() as stack:
        simulator, status = (stack.enter_context(held_port()) for _ in range(2))
        elsewhere = {
            "/tmp/bridge-approval": str(tmp_path / "approval"),
            "127.0.0.1:8169": f"127.0.0.1:{simulator}",
            # The page uses the default addresses.
            "simulate quiet": f"simulate quiet --listen 127.0.0.1:{simulator}",
            "[approval]": f'[status]\nlisten = "127.0.0.1:{status}"\n\n[approval]',
        }
        desk = Desk("docs/start/first-approval.md", tmp_path, agent_env, elsewhere)
        yield desk
        desk.leave()


def test_commands_of_the_first_approval_page_approve_and_start_an_event(desk):
    enter = desk.text("approval: enter")
    desk.do(enter)
    (desk.home / "approval" / "approval.toml").write_text(desk.text("file: approval.toml"))
    desk.begin(enter + desk.text("approval: run"))
    desk.wait_for("control: http")  # The simulator may start after the agent.
    desk.wait_for("is running")
    desk.do(enter + desk.text("approval: announce"))
    desk.wait_for(" scheduled: Reboot")
    desk.do(enter + desk.text("approval: approve"))
    desk.wait_for(" approved: Reboot")
    desk.wait_for(" started: Reboot")
