"""SIGKILL at random points around approvals: no approval is lost, and nothing is posted without an approval.

A person approves on the VM or through the portal while the agent is killed and started again. Every approved event must
reach Azure, no other event may, and a hold stays in force. The simulator keeps every approved event Scheduled. A second
test has a command of `[approval.remote]`: nothing may reach Azure before the command has ended once.

``KILLS=200 pytest -m long -s tests/faults/test_kill_approval.py`` is the long run.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import fork_server
import pytest
from portal_stub import PortalStub

from bridge.agent.control import ControlClient
from bridge.agent.requests import Decide
from bridge.approval.digest import digest
from bridge.errors import BridgeError
from bridge.imds.document import parse_document
from bridge.outbox.approvals import cli_decision
from bridge.testing import EventSpec, Simulator

KILLS = int(os.environ.get("KILLS", "12"))
CHAINS = 4


class Story:
    """What people decide while the agent is being killed."""

    def __init__(self, azure, portal, directory, seed):
        self.azure, self.portal, self.directory = azure, portal, directory
        self.chance = random.Random(seed)
        self.vm_id = azure.machines[0].vm_id
        self.approved, self.held, self.ignored = set(), set(), set()
        self.unknown = set()
        """Events whose local decision had no answer. The agent may have stored the decision."""
        self.by_portal = set()

    def go_on(self):
        """Announce an event, and mostly decide on it."""
        event_id = self.azure.world.add_event(
            EventSpec(event_type="Freeze", on_approval="never", notice_seconds=3600, resources=("vm_0", "vm_1"))
        )
        document = parse_document(self.azure.world.document())
        event = next(each for each in document.events if each.event_id == event_id)
        what = self.chance.choice(["portal", "portal", "cli", "hold", "nothing"])
        # An answer that the agent has seen the event in, or it would be refused as unknown, and rightly: the first may
        # be from before the event, and the second is seen when the third is asked for.
        wanted = polls(self.azure) + 3
        wait_until(lambda: polls(self.azure) >= wanted)
        if what == "portal":
            self.portal.decide(event, vm_id=self.vm_id)
            self.by_portal.add(event_id)
        elif what == "cli":
            what = "portal" if self.decide_here(event) else "unknown"
        elif what == "hold":
            self.portal.decide(event, vm_id=self.vm_id, decision="hold")
        events = {"portal": self.approved, "hold": self.held, "unknown": self.unknown}
        events.get(what, self.ignored).add(event_id)

    def decide_here(self, event):
        """Return whether the agent reported the decision as stored."""
        decision = cli_decision(
            approver="root",
            decision_id=f"cli-{event.event_id}",
            event=event,
            event_digest=digest(event),
            valid_seconds=3600,
        )
        try:
            return not ControlClient(self.directory / "state").ask(Decide(decision=decision)).other_holds
        except BridgeError:
            return False


def drain(directory):
    """Return the command of a drain that writes which events it has done."""
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
    """Return what was posted that nobody wanted, and what was wanted and never posted."""
    drained = directory / "drained"
    drained.touch()
    options = {"command": drain(directory)} if has_command else {}
    with Simulator(vms=["vm_0"], rate_limit=False) as azure, PortalStub(directory / "portal") as portal:
        config = directory / "config.toml"
        config.write_text(
            f'[imds]\nendpoint = "{azure.endpoint}"\npoll_interval_seconds = 0.2\n'
            f'[state]\ndirectory = "{directory / "state"}"\n[status]\nlisten = ""\n{portal.toml(**options)}'
        )
        story = Story(azure, portal, directory, seed)
        out = directory / "out.jsonl"
        with out.open("ab") as stdout, (directory / "err.log").open("ab") as stderr:

            def started():
                return fork_server.start(
                    "run", "--config", config, stdout=stdout, stderr=stderr, env=env, cwd=directory
                )

            agent = started()
            wait_until(lambda: list((directory / "state").glob("outbox-*.db")))
            for _ in range(kills):
                wait_until(lambda agent=agent: is_polling(azure, agent))
                story.go_on()
                time.sleep(story.chance.choice([0.0, 0.0, 0.01, 0.02, 0.05, story.chance.uniform(0, 1.2)]))
                agent.kill()
                agent.wait()
                agent = started()
            wait_until(lambda: is_polling(azure, agent))
            wait_until(lambda: story.approved <= posted(azure) & recorded(out), timeout_seconds=60, is_must=False)
            time.sleep(1)  # for requests without an approval
            agent.terminate()
            assert agent.wait(20) == 0
        log = (directory / "err.log").read_text()
        assert "Traceback" not in log, log
        return {
            "approved": len(story.approved),
            "held": len(story.held),
            "never reached Azure": len(story.approved - posted(azure)),
            "nobody gave": len(posted(azure) - story.approved - story.unknown),
            "no record": len(story.approved - recorded(out)),
            "record of what nobody gave": len(recorded(out) - story.approved - story.unknown),
            "posted before its command": len((posted(azure) & story.by_portal) - set(drained.read_text().split()))
            if has_command
            else 0,
        }


def polls(azure):
    return sum(each.path.endswith("scheduledevents") and each.status == 200 for each in azure.requests)


def posted(azure):
    return {approval.event_id for approval in azure.world.approvals}


def recorded(path):
    found = set()
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut by the kill; it comes again whole
            continue
        if record["transition"] == "approved":
            found.add(record["event"]["event_id"])
    return found


def is_polling(azure, agent):
    """Return whether this life of the agent has asked for the document."""
    mark = getattr(agent, "mark", None)
    if mark is None:
        agent.mark = len(azure.requests)
        return False
    requests = azure.requests[agent.mark :]
    return any(each.path.endswith("scheduledevents") and each.status == 200 for each in requests)


def wait_until(condition, *, timeout_seconds=30, is_must=True):
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            assert not is_must, "it did not come"
            return
        time.sleep(0.02)


def judge(summary):
    wrong = {name: count for name, count in summary.items() if name not in ("approved", "held") and count}
    assert not wrong, summary


def test_approvals_survive_sigkill_at_random_points(tmp_path, agent_env):
    judge(kill_many(tmp_path, agent_env, kills=KILLS, chains=2))


def test_what_waits_for_a_command_survives_sigkill_at_random_points(tmp_path, agent_env):
    judge(kill_many(tmp_path, agent_env, kills=max(KILLS // 2, 2), chains=2, has_command=True))


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_approvals_survive_sigkill_two_hundred_times(tmp_path, agent_env):
    total = kill_many(tmp_path, agent_env, kills=max(KILLS, 200), chains=CHAINS)
    print(f"\nbench: approvals and SIGKILL: {dict(total)}")  # noqa: T201
    judge(total)


def kill_many(tmp_path, env, *, kills, chains, has_command=False):
    """Share *kills* out over *chains* agents, two at a time; return the summed counts."""

    def one(chain):
        directory = tmp_path / f"chain{chain}"
        directory.mkdir()
        return Counter(
            run_story(
                directory,
                env,
                kills=-(-kills // chains),
                seed=random.SystemRandom().randrange(2**32),
                has_command=has_command,
            )
        )

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(one, range(chains)), Counter())
