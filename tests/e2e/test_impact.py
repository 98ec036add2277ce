"""The measured impact of an ended event, as `status` shows it."""

import json
import re
import time

from bridge.testing import EventSpec, Simulator


def status(agent, *arguments):
    code, out, err = agent.call("status", "--config", agent.config, *arguments)
    assert (code, err) == (0, "")
    return out


def test_status_shows_the_measured_impact_of_the_last_event(agent):
    with Simulator(vms=["vm_0"], rate_limit=False) as azure:
        agent.configure(azure.endpoint)
        event_id = azure.world.add_event(EventSpec(event_type="Freeze", status="Started", resources=("vm_0",)))
        agent.start()
        agent.wait_for(lambda: agent.records)
        azure.world.complete(event_id)
        agent.wait_for(lambda: len(agent.records) > 1)
        deadline = time.monotonic() + 30
        while (ending := json.loads(status(agent, "--json"))["last_ending"]) is None:
            assert time.monotonic() < deadline
        assert (ending["transition"], ending["impact"]["pauses"]) == ("completed", [])
        assert re.search(r"Last measured event: Freeze completed \d{4}.*\. Measured pause: ", status(agent))
