"""Runs the pages "First VM" and "Emergency" with the simulator in place of Azure."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import doc_pages
import pytest
from desk import Desk
from held_port import held_port

from bridge.testing import EventSpec, Simulator

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs a shell"),
    pytest.mark.skipif(
        not (Path(sys.prefix) / "bin" / "activate").exists(), reason="the tests do not run in a virtual environment"
    ),
]


@pytest.fixture
def azure():
    with Simulator("quiet", listen="127.0.0.1:0") as azure:
        yield azure


@pytest.fixture
def vm(tmp_path, agent_env, azure):
    """Return a function that opens the desk of a page, with a running agent and the configuration of first-vm."""
    state, config = tmp_path / "state", tmp_path / "config.toml"
    environment = {
        **agent_env,
        "SCHEDULED_EVENTS_BRIDGE_CONFIG": str(config),
        "SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY": str(state),
    }
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        elsewhere = {"127.0.0.1:9464": f"127.0.0.1:{port}", "/var/lib/scheduled-events-bridge": str(state)}
        environment["SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN"] = elsewhere["127.0.0.1:9464"]

        def open_desk(page):
            desk = Desk(page, tmp_path, environment, elsewhere)
            stack.callback(desk.leave)
            shown = doc_pages.marked(doc_pages.page("docs/start/first-vm.md"), "file: config.toml")
            config.write_text(f'[imds]\nendpoint = "{azure.endpoint}"\n{shown}')
            desk.begin("exec scheduled-events-bridge run")
            desk.wait_for("is running")
            return desk

        yield open_desk


def test_first_vm_page_matches_an_approved_reboot(vm, azure):
    desk = vm("docs/start/first-vm.md")
    output = desk.do(desk.text("first VM: look"))
    assert "The agent is running and ready." in output
    assert "simulated-vm" in output
    desk.begin(desk.text("first VM: watch"))
    event_id = azure.world.add_event(EventSpec(event_type="Reboot", event_source="User", resources=("simulated-vm",)))
    desk.wait_for(rf"scheduled +(?:observed +)?Reboot[^\n]*\n?[^\n]*{event_id}")
    output = desk.do(desk.text("first VM: approve").replace("EVENT_ID", event_id), typed="y\n")
    assert "simulated-vm" in output
    desk.wait_for(" started: Reboot")
    azure.world.complete(event_id)
    desk.wait_for(" completed: Reboot")
    shown = desk.show(desk.text("first VM: after"))
    # On a VM, the agent restarts with the machine. In this test, it observes the end of the event.
    assert like(shown) == like(desk.text("first VM: seen").replace("inferred", "observed"))


def like(text):
    """Return the lines of *text* with placeholders for times, EventIds, and VM names."""
    for pattern, word in ((r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "TIME"), (r"[0-9A-F]{8}(-[0-9A-F]{4,12}){4}", "ID")):
        text = re.sub(pattern, word, text)
    return [line.rstrip() for line in re.sub(r"(?<=ID  )(simulated-vm|VM)", "VM", text).splitlines()]


def test_status_reports_the_file_that_disables_approvals(vm):
    desk = vm("docs/operate/emergency.md")
    touch, status, remove = desk.text("approvals: stop").splitlines()
    before = desk.do(status)
    desk.do(touch)
    assert "approvals.disabled" in desk.do(status)
    desk.do(remove)
    assert "approvals.disabled" not in before + desk.do(status)
