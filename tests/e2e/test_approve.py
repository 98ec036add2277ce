"""Approvals from end to end: the simulator as Azure, the agent as a process, and `approve`."""

import json
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest
from portal_stub import PortalStub

from bridge.events.record import decode_record
from bridge.testing import EventSpec, Simulator

SECOND_SINK = '[[sinks]]\ntype = "stdout"\n[[sinks]]\ntype = "file"\nname = "second"\n'
FREEZE_RULE = '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0", "vm_1", "vm_2"], rate_limit=False) as simulator:
        yield simulator


def configure(agent, azure, text, *, vm="vm_0"):
    second = f'{SECOND_SINK}path = "{agent.directory / "second.jsonl"}"\n'
    agent.configure(azure.endpoints[vm], f"{second}{text}")


def transitions(agent):
    return [record["transition"] for record in agent.records]


def second(agent):
    path = agent.directory / "second.jsonl"
    return [json.loads(line)["transition"] for line in path.read_text().splitlines()] if path.exists() else []


def approvals(azure):
    return [(each.vm, each.event_id, each.result) for each in azure.world.approvals]


def assert_in_order(agent, azure):
    expected = ["scheduled", "approved", "started"]
    agent.wait_for(lambda: transitions(agent) == expected)
    agent.wait_for(lambda: second(agent) == expected)
    assert len(approvals(azure)) == 1
    assert agent.stop() == 0
    assert "Traceback" not in agent.log


def test_rule_approval_sends_approved_then_started_to_every_sink(agent, azure):
    configure(agent, azure, FREEZE_RULE)
    agent.start()
    azure.world.add_event(EventSpec(event_type="Freeze"))
    assert_in_order(agent, azure)
    assert agent.records[1]["approval"] == {
        "source": "rule:freeze",
        "decision_id": None,
        "approvers": [],
        "reason": None,
        "result": "accepted",
        "http_status": 200,
        "jws_sha256": [],
    }


def test_portal_approval_sends_approved_then_started_to_every_sink(agent, azure, tmp_path):
    with PortalStub(tmp_path / "portal") as portal:
        configure(agent, azure, portal.toml())
        agent.start()
        azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: transitions(agent) == ["scheduled"])
        record = decode_record(agent.out.read_text())
        portal.decide(record.event, vm_id=record.vm.vm_id, reason="night shift", jti="d-1")
        assert_in_order(agent, azure)
    approval = agent.records[1]["approval"]
    assert (approval["source"], approval["decision_id"], approval["reason"]) == ("portal", "d-1", "night shift")
    assert approval["approvers"] == ["portal"]
    [line] = [line for line in map(json.loads, agent.log.splitlines()) if line.get("result") == "accepted"]
    assert f"Azure accepted the approval of event {line['event_id']} (reason: night shift)" in line["message"]


def test_approve_command_sends_approved_then_started_to_every_sink(agent, azure):
    configure(agent, azure, "[approval]")
    agent.start()
    event_id = azure.world.add_event(EventSpec(event_type="Reboot", description="Virtual machine is being rebooted."))
    agent.wait_for(lambda: transitions(agent) == ["scheduled"])
    code, out, err = agent.call("approve", event_id, "--yes", "--config", agent.config)
    assert code == 0, err
    assert out.startswith("approved: ")
    for shown in ("Reboot", event_id, "vm_0", "vm_1", "vm_2", "not before", "being rebooted"):
        assert shown in err
    assert_in_order(agent, azure)
    assert agent.records[1]["approval"]["source"] == "cli"
    assert agent.records[1]["approval"]["approvers"]


def test_approve_fails_without_a_running_agent(agent, azure):
    configure(agent, azure, "[approval]\n" + FREEZE_RULE)
    event_id = azure.world.add_event(EventSpec(event_type="Reboot"))
    for _ in range(2):
        code, out, err = agent.call("approve", event_id, "--yes", "--config", agent.config)
        assert (code, out) == (1, "")
        assert err.startswith(f"No agent runs on the state directory {agent.state}. ")
        agent.state.mkdir(mode=0o700, exist_ok=True)
    assert list(agent.state.iterdir()) == []
    assert approvals(azure) == []


@pytest.mark.parametrize("requested", ["unknown event", "started event"])
def test_approve_rejects_an_unknown_or_started_event_and_escapes_terminal_codes(agent, azure, requested):
    configure(agent, azure, "[approval]")
    painted = "\x1b[2J\x1b[Happroved: Azure took it.\x9b\u202e\nnames"
    agent.start()
    azure.world.add_event(EventSpec(event_type="Freeze", event_id=painted, description=painted, status="Started"))
    agent.wait_for(lambda: transitions(agent) == ["started"])
    event_id = painted if requested == "started event" else "another"
    code, out, err = agent.call("approve", event_id, "--yes", "--config", agent.config)
    assert code == 1
    assert ("Started" if requested == "started event" else "another") in err
    assert approvals(azure) == []
    assert not {"\x1b", "\x9b", "\u202e"} & set(out + err)
    assert r"\x1b[2J" in err
    assert not any(line.startswith("names") for line in err.splitlines())


def test_approve_without_confirmation_posts_nothing(agent, azure):
    configure(agent, azure, "[approval]")
    agent.start()
    event_id = azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.wait_for(lambda: transitions(agent) == ["scheduled"])
    code, _, err = agent.call("approve", event_id, "--config", agent.config)  # standard input is empty
    assert code != 0
    assert "Approve this event?" in err
    assert approvals(azure) == []


@pytest.mark.parametrize("against", ["a hold", "two required approvals"])
def test_approve_overrides_a_hold_or_quorum_only_with_overrule(agent, azure, tmp_path, against):
    with PortalStub(tmp_path / "portal") as portal:
        portal.add_key("second-key", approver="second")
        is_hold = against == "a hold"
        configure(agent, azure, portal.toml(required_approvals=1 if is_hold else 2))
        agent.start()
        event_id = azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: transitions(agent) == ["scheduled"])
        if is_hold:
            record = decode_record(agent.out.read_text())
            portal.decide(record.event, vm_id=record.vm.vm_id, decision="hold", reason="backup runs")
            agent.wait_for(lambda: "backup runs" in agent.call("status", "--config", agent.config)[1])
        words = "hold of portal: backup runs" if is_hold else "required_approvals = 2"
        code, _, err = agent.call("approve", event_id, "--yes", "--config", agent.config)
        assert code == 1
        assert words in err
        assert "--overrule" in err
        assert approvals(azure) == []
        code, _, err = agent.call("approve", event_id, "--yes", "--overrule", "--config", agent.config)
        assert code == 0, err
        assert_in_order(agent, azure)
    assert words in agent.records[1]["approval"]["reason"]


def test_hold_that_arrives_during_the_prompt_stops_the_approval(agent, azure, tmp_path):
    with PortalStub(tmp_path / "portal") as portal:
        configure(agent, azure, portal.toml())
        agent.start()
        event_id = azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: transitions(agent) == ["scheduled"])
        record = decode_record(agent.out.read_text())
        command, output_file = agent.command("approve", event_id, "--config", agent.config), tmp_path / "output"
        with (
            output_file.open("w") as output,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=agent.env, cwd=tmp_path
            ) as person,
        ):
            agent.wait_for(lambda: "Approve this event?" in output_file.read_text())
            portal.decide(record.event, vm_id=record.vm.vm_id, decision="hold", reason="backup runs")
            agent.wait_for(lambda: "backup runs" in agent.call("status", "--config", agent.config)[1])
            person.communicate(b"y\n", timeout=60)
        assert person.returncode == 1
        assert "Nothing was approved, because the hold of portal: backup runs arrived." in output_file.read_text()
        time.sleep(1)
        assert approvals(azure) == []


def test_approve_exits_1_while_approvals_are_disabled(agent, azure):
    configure(agent, azure, "[approval]")
    agent.start()
    event_id = azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.wait_for(lambda: transitions(agent) == ["scheduled"])
    (agent.state / "approvals.disabled").touch()
    code, _, err = agent.call("approve", event_id, "--yes", "--config", agent.config)
    assert code == 1
    assert "approvals.disabled" in err
    assert approvals(azure) == []


def test_agent_without_an_approval_table_posts_no_approval(agent, azure):
    configure(agent, azure, "")
    event_id = azure.world.add_event(EventSpec(event_type="Freeze"))
    code, _, err = agent.call("approve", event_id, "--yes", "--config", agent.config)
    assert code == 1
    assert "Approvals are not configured" in err
    agent.start()
    agent.wait_for(lambda: transitions(agent) == ["scheduled"])
    configure(agent, azure, "[approval]")  # the agent has not loaded it
    code, _, err = agent.call("approve", event_id, "--yes", "--config", agent.config)
    assert (code, "that it loaded has no [approval] table" in err) == (1, True)
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for(lambda: "The configuration was reloaded" in agent.log)
    assert approvals(azure) == [], "the agent posted the rejected approval after the reload"


def test_approved_event_that_disappears_is_recorded_as_ended_not_canceled(agent, azure):
    configure(agent, azure, FREEZE_RULE)
    agent.start()
    approved = azure.world.add_event(EventSpec(event_type="Freeze", on_approval="never"))
    other = azure.world.add_event(EventSpec(event_type="Reboot"))
    agent.wait_for(lambda: "approved" in transitions(agent))
    azure.world.cancel(approved)
    agent.wait_for(lambda: "ended" in transitions(agent))
    azure.world.cancel(other)
    agent.wait_for(lambda: "canceled" in transitions(agent))
    endings = {each["event"]["event_id"]: each["transition"] for each in agent.records}
    assert endings == {approved: "ended", other: "canceled"}


# Several VMs.


@contextmanager
def fleet(agent, azure, text, names=("vm_0", "vm_1", "vm_2")):
    agents = {}
    try:
        for name in names:
            directory = agent.directory / name
            directory.mkdir()
            agents[name] = type(agent)(directory, agent.env)
            configure(agents[name], azure, text(name) if callable(text) else text, vm=name)
            agents[name].start()
        for each in agents.values():
            each.wait_for(lambda each=each: "The agent is running" in each.log)
        yield agents
    finally:
        for each in agents.values():
            if each.process.poll() is None:
                each.kill()


def test_only_the_next_vm_approves_when_the_leader_is_down(agent, azure):
    with fleet(agent, azure, "[approval]\nleader_fallback_seconds = 4\n" + FREEZE_RULE) as agents:
        agents["vm_0"].kill()
        event_id = azure.world.add_event(EventSpec(event_type="Freeze"))
        agents["vm_2"].wait_for(lambda: "started" in transitions(agents["vm_2"]))
        time.sleep(5)
        assert approvals(azure) == [("vm_1", event_id, "approved")]
        assert "approved" not in transitions(agents["vm_2"])
