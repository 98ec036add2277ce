"""SIGKILL at random points around approvals: the agent posts each valid approval and no other approval.

People approve with the command on the VM or through the portal while the agent is killed and restarted. Every approval
must reach Azure, and no event with a hold or without an approval may be posted. Azure keeps every approved event
Scheduled, so an approval stays possible. A second test adds a command to `[approval.remote]`. An approval of the portal
must not reach Azure before the command has completed once.

``KILLS=200 pytest -m long -s tests/faults/test_kill_approval.py`` is the long form.
"""

import os
import random
import sys
import time

import pytest
from agent_stage import Stage, sum_of_chains
from portal_stub import PortalStub

from bridge.agent.control_requests import decide
from bridge.agent.control_socket import ControlClient
from bridge.cli.approve import cli_decision
from bridge.errors import BridgeError
from bridge.imds.document import parse_document

KILLS = int(os.environ.get("KILLS", "12"))
VM_ID = "AAAA"


class Story:
    """The decisions of people during the kills."""

    def __init__(self, stage, portal, seed):
        self.stage, self.portal = stage, portal
        self.chance = random.Random(seed)
        self.approved, self.uncertain = set(), set()
        self.by_portal = set()
        self.made = 0

    def step(self):
        """Announce an event, and decide on most events."""
        self.made += 1
        event_id = f"E-{self.made}"
        self.stage.azure.announce(event_id)
        document = parse_document(self.stage.azure.document())
        event = next(each for each in document.events if each.event_id == event_id)
        # The agent rejects a decision on an unknown event. The response to the first poll may lack the event.
        self.stage.wait_for_polls(3, 30)
        what = self.chance.choice(["portal", "portal", "command", "hold", "nothing"])
        if what == "portal":
            self.portal.decide(event, vm_id=VM_ID)
            self.by_portal.add(event_id)
            self.approved.add(event_id)
        elif what == "command":
            (self.approved if self.approve_on_the_vm(event) else self.uncertain).add(event_id)
        elif what == "hold":
            self.portal.decide(event, vm_id=VM_ID, decision="hold")

    def approve_on_the_vm(self, event):
        """Return whether the agent reported the decision as saved."""
        decision = cli_decision(
            approver="root",
            decision_id=f"cli-{event.event_id}",
            event=event,
            valid_seconds=3600,
        )
        try:
            ControlClient(self.stage.state).change(decide, decision=decision)
        except BridgeError:
            return False
        return True


def drain(directory):
    """Return a drain command that writes the EventId of each completed drain to a file."""
    program = directory / "drain.py"
    program.write_text(
        "import json, random, sys, time\n"
        "record = json.load(sys.stdin)\n"
        "time.sleep(random.uniform(0, 0.5))\n"
        f"with open({str(directory / 'drained')!r}, 'a') as drained:\n"
        "    drained.write(record['event']['event_id'] + '\\n')\n"
    )
    return [sys.executable, str(program)]


def run_story(directory, env, *, kills, seed, has_command=False):
    """Return the numbers of approvals and of errors by kind."""
    drained = directory / "drained"
    drained.touch()
    options = {"command": drain(directory)} if has_command else {}
    with PortalStub(directory / "portal") as portal:
        stage = Stage(directory, env, approval=f"[approval]\n{portal.toml(**options)}")
        try:
            story = Story(stage, portal, seed)
            stage.start()
            for _ in range(kills):
                story.step()
                time.sleep(story.chance.choice([0.0, 0.0, 0.01, 0.02, 0.05, story.chance.uniform(0, 1.2)]))
                stage.kill()
                stage.start()
            deadline = time.monotonic() + 60
            while not story.approved <= stage.azure.approved() & recorded(stage) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(1)  # time for an invalid approval
            stage.process.terminate()
            assert stage.process.wait(20) == 0
            assert "Traceback" not in stage.log, stage.log
        finally:
            stage.close()
    posted = stage.azure.approved()
    return {
        "approved": len(story.approved),
        "not posted": len(story.approved - posted),
        "posted without an approval": len(posted - story.approved - story.uncertain),
        "posted before saved": len(stage.unsaved_approvals),
        "no record": len(story.approved - recorded(stage)),
        "record without an approval": len(recorded(stage) - story.approved - story.uncertain),
        "posted before its command": len((posted & story.by_portal) - set(drained.read_text().split()))
        if has_command
        else 0,
    }


def recorded(stage):
    """Return the events with a record of an approval."""
    return {event_id for event_id, transition in stage.healthy.transitions() if transition == "approved"}


@pytest.mark.parametrize(
    ("kills", "chains", "has_command"),
    [
        (KILLS, 2, False),
        (max(KILLS // 2, 2), 2, True),
        pytest.param(max(KILLS, 200), 4, False, marks=[pytest.mark.long, pytest.mark.timeout(5400)]),
    ],
    ids=["approvals", "approvals with a command", "200 kills"],
)
def test_approvals_survive_sigkill_at_random_points(tmp_path, agent_env, kills, chains, has_command):
    def run(directory, seed):
        return run_story(directory, agent_env, kills=-(-kills // chains), seed=seed, has_command=has_command)

    total = sum_of_chains(run, tmp_path, chains=chains, at_once=2)
    print(f"\nbench: approvals and SIGKILL: {dict(total)}")  # noqa: T201
    assert {name for name, count in total.items() if count} <= {"approved"}, total
