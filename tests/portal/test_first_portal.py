"""The page of the first portal: its files and commands, up to the start of an approved event."""

import re
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from desk import SECONDS, Desk
from held_port import held_port
from page_kit import PASSWORD, Browser

#: From an empty directory.
FIRST_EVENT_SECONDS = 60

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs a shell"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
    pytest.mark.skipif(
        not (Path(sys.prefix) / "bin" / "activate").exists(), reason="the tests do not run in a virtual environment"
    ),
]


@pytest.fixture
def desk(tmp_path, agent_env):
    with ExitStack() as stack:
        simulator, status, portal, operator = (stack.enter_context(held_port()) for _ in range(4))
        elsewhere = {
            "/tmp/bridge-portal": str(tmp_path / "portal"),  # the paths and addresses of the page
            "127.0.0.1:8169": f"127.0.0.1:{simulator}",
            "127.0.0.1:8443": f"127.0.0.1:{portal}",
            # The page uses default addresses, and the test needs free ports.
            "simulate quiet": f"simulate quiet --listen 127.0.0.1:{simulator}",
            "[approval.remote]\n": f'[status]\nlisten = "127.0.0.1:{status}"\n\n[approval.remote]\n',
            "[database]": (
                f'[server]\nlisten = "127.0.0.1:{portal}"\n[operator]\nlisten = "127.0.0.1:{operator}"\n\n[database]'
            ),
        }
        desk = Desk("docs/start/first-portal.md", tmp_path, agent_env, elsewhere)
        desk.portal = f"http://127.0.0.1:{portal}"
        yield desk
        desk.leave()


def test_documented_first_portal_approves_an_event_that_then_starts(desk):
    enter = desk.text("first portal: enter")
    began = time.monotonic()
    desk.do(enter + desk.text("first portal: secrets"))
    home = desk.home / "portal"
    (home / "portal.toml").write_text(desk.text("file: first portal.toml"))
    (home / "agent.toml").write_text(desk.text("file: first agent.toml"))
    desk.do(enter + desk.text("first portal: user"), typed=f"{PASSWORD}\n")
    desk.do(enter + "scheduled-events-bridge check-config --config agent.toml")
    desk.begin(enter + desk.text("first portal: run"))
    desk.wait_for("control: http")  # of the simulator, which might start later than the agent
    desk.wait_for("is running")
    desk.do(enter + desk.text("first portal: announce"))
    desk.wait_for(" scheduled: Reboot")
    browser = Browser(desk.portal)
    give_up_at = time.monotonic() + SECONDS
    while (event := _event_to_approve(browser)) is None:
        assert time.monotonic() < give_up_at, "the page has no button"
        time.sleep(0.1)
    assert time.monotonic() - began < FIRST_EVENT_SECONDS
    browser.submit(event, "approve", reason="drained")
    desk.wait_for(" approved: Reboot")
    desk.wait_for(" started: Reboot")


def _event_to_approve(browser):
    """Return the path of the event page, or None if the page has no button yet."""
    try:
        browser.sign_in("ann")
        found = re.search("/events/[0-9a-f]{32}", browser.get("/").text)
        return found[0] if found and 'value="approve"' in browser.get(found[0]).text else None
    except requests.ConnectionError:
        return None
