"""A selection of 20 events that real agents approve: one confirmation, and one StartRequests per event."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from page_kit import Office
from portal_kit import AGENT_TOKEN
from waiting import until

from bridge.clock import REAL_CLOCK
from bridge.testing import EventSpec, Simulator
from bridge.testing.simulator.machines import Machine

pytestmark = pytest.mark.timeout(180)

EVENTS = 20
WITHIN_SECONDS = 120
#: The first variable hides lost output.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def configuration(directory, azure, office):
    token = directory / "token"
    token.write_text(AGENT_TOKEN)
    token.chmod(0o600)
    credential = f'token_file = "{token}"'
    return f"""
[imds]
endpoint = "{azure.endpoint}"
[state]
directory = "{directory / "state"}"
[status]
listen = "127.0.0.1:0"
[approval.remote]
url = "{office.portal.url}"
{credential}
[[approval.remote.keys]]
kid = "p1"
approver = "portal"
public_key_file = "{office.public_key_file}"
[[sinks]]
type = "webhook"
name = "portal"
url = "{office.portal.url}/records"
bearer_{credential}
"""


def run_agent(stack, directory, azure, office):
    directory.mkdir(mode=0o700)
    config = directory / "config.toml"
    config.write_text(configuration(directory, azure, office))
    log = stack.enter_context((directory / "agent.log").open("wb"))
    agent = subprocess.Popen(
        [sys.executable, "-m", "bridge", "run", "--config", config], env=ENVIRONMENT, stderr=log, stdout=log
    )
    stack.callback(agent.wait, 30)
    stack.callback(agent.terminate)


def test_selection_of_20_events_results_in_one_start_requests_per_event(tmp_path):
    with ExitStack() as stack:
        office = stack.enter_context(Office(tmp_path, clock=REAL_CLOCK))
        vms = [Machine(name=f"vm-{number}", resource_group=f"group-{number}") for number in range(EVENTS)]
        clouds = [stack.enter_context(Simulator(vms=[vm], rate_limit=False)) for vm in vms]
        for number, azure in enumerate(clouds):
            azure.world.add_event(EventSpec(event_type="Reboot", impact_seconds=1e6))
            run_agent(stack, tmp_path / f"agent-{number}", azure, office)
        ann = office.browser("ann")

        def whole():
            ready = "0 agents would not follow 0 disconnected 0 affected VMs without a polling agent"
            found = office.portal.get("/events?state=open").json()["events"]
            return found if len(found) == EVENTS and ready in ann.page("/").text else None

        events = until(whole, WITHIN_SECONDS)
        until(lambda: f"{EVENTS} connected" in ann.page("/agents").text, WITHIN_SECONDS)
        query = "&".join(f"event={each['key']}" for each in events)
        answer = ann.submit(f"/decide?verdict=approve&{query}", "approve", reason="month end")
        assert answer.status_code in {200, 303}, answer.text
        until(lambda: all(azure.world.approvals for azure in clouds), WITHIN_SECONDS)
        until(lambda: f"{EVENTS} started" in ann.page("/").text, WITHIN_SECONDS)
        assert [len(azure.world.approvals) for azure in clouds] == [1] * EVENTS
        assert len({azure.world.approvals[0].event_id for azure in clouds}) == EVENTS
        entries = office.portal.get("/audit").json()["entries"]
        [approved] = [each for each in entries if each["action"] == "approved"]
        assert len(approved["details"]["events"]) == EVENTS
