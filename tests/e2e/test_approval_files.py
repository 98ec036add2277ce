"""Files that control approvals: missing keys do not stop the agent, and files writable by others stop approvals."""

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
from held_port import held_port
from portal_stub import PortalStub

from bridge.events.record import decode_record
from bridge.testing import EventSpec

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the agent does not check Windows access lists")

FREEZE_RULE = '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'
STRANGER = 65534
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a file to another user"
)


@pytest.fixture
def free_port():
    with held_port() as port:
        yield port


def transitions(agent):
    return [record["transition"] for record in agent.records]


def result(agent):
    return [record["approval"]["result"] for record in agent.records if record["approval"] is not None]


def configure(agent, azure, text, port):
    agent.configure(azure.endpoint, text)
    agent.config.write_text(agent.config.read_text().replace('listen = ""', f'listen = "127.0.0.1:{port}"'))


def metric(port, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"scheduled_events_bridge_{name} ")]
    return float(value)


def errors(agent):
    lines = [json.loads(line) for line in agent.log.splitlines() if line.startswith("{")]
    return [line["message"] for line in lines if line["level"] == "ERROR"]


def status(agent):
    code, out, err = agent.call("status", "--json", "--config", agent.config)
    assert code == 0, err
    return json.loads(out)["configuration"]


# Missing and invalid key files.


@pytest.mark.parametrize("content", [None, "no key at all\n"])
def test_agent_starts_and_records_with_a_missing_or_invalid_key_file(agent, azure, tmp_path, free_port, content):
    with PortalStub(tmp_path / "portal") as portal:
        configure(agent, azure, portal.toml(), free_port)
        (file,) = (Path(table["public_key_file"]) for table in portal.key_tables())
        file.unlink()
        if content is not None:
            (tmp_path / "new").write_text(content)
            (tmp_path / "new").replace(file)
        agent.start("--log-format", "json")
        azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: transitions(agent) == ["scheduled"])
        assert any(str(file) in message for message in errors(agent))
        assert metric(free_port, "approval_keys_unusable") == 1
        assert str(file) in status(agent)["unusable_keys"][0]
        code, out, _ = agent.call("check-config", "--config", agent.config)
        assert code == 1
        assert str(file) in out
        record = decode_record(agent.out.read_text().splitlines()[0])
        agent.wait_for(lambda: portal.requests)  # The portal holds the next request until the decision exists.
        portal.decide(record.event, vm_id=record.vm.vm_id)
        agent.wait_for(lambda: len(portal.requests) > 2)
        assert not azure.world.approvals
    assert agent.stop() == 0


def test_reload_succeeds_after_a_key_is_revoked_by_deleting_its_file(agent, azure, tmp_path, free_port):
    with PortalStub(tmp_path / "portal") as portal:
        configure(agent, azure, portal.toml(), free_port)
        (file,) = (Path(table["public_key_file"]) for table in portal.key_tables())
        agent.start("--log-format", "json")
        agent.wait_for(lambda: "The agent is running" in agent.log)
        assert metric(free_port, "approval_keys_unusable") == 0
        file.unlink()
        agent.config.write_text(agent.config.read_text() + '[labels]\nteam = "blue"\n')
        agent.process.send_signal(signal.SIGHUP)
        agent.wait_for(lambda: "The configuration was reloaded" in agent.log)
        agent.wait_for(lambda: metric(free_port, "approval_keys_unusable") == 1)
        assert metric(free_port, "config_last_reload_successful") == 1
        assert any(str(file) in message for message in errors(agent))
    assert agent.stop() == 0


# Files that other users can write to.


def world_writable_configuration(agent):
    agent.config.chmod(0o666)
    return agent.config, lambda: agent.config.chmod(0o644)


def group_writable_state(agent):
    agent.state.mkdir(exist_ok=True)
    agent.state.chmod(0o770)
    return agent.state, lambda: agent.state.chmod(0o700)


def world_writable_outbox(agent):
    agent.start().wait_for(lambda: "The agent is running" in agent.log)
    assert agent.stop() == 0
    agent.state.chmod(0o755)
    (file,) = agent.state.glob("outbox-*.db")
    file.chmod(0o666)
    return file, lambda: [path.chmod(0o600) for path in agent.state.iterdir()]


def foreign_configuration(agent):
    os.chown(agent.config, STRANGER, 0)
    return agent.config, lambda: os.chown(agent.config, 0, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        world_writable_configuration,
        group_writable_state,
        world_writable_outbox,
        pytest.param(foreign_configuration, marks=needs_root),
    ],
)
def test_approvals_pause_while_other_users_can_write_to_trusted_files(agent, azure, free_port, spoil):
    configure(agent, azure, FREEZE_RULE, free_port)
    path, repair = spoil(agent)
    agent.start("--log-format", "json")
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.wait_for(lambda: "approval_failed" in transitions(agent))
    assert result(agent) == ["unsafe_files"]
    assert str(path) in agent.records[-1]["approval"]["reason"]
    assert not azure.world.approvals
    agent.wait_for(lambda: any("Nothing is approved" in each and str(path) in each for each in errors(agent)))
    assert metric(free_port, "approval_files_unsafe") >= 1
    assert str(path) in status(agent)["approvals_unsafe"][0]
    code, out, _ = agent.call("check-config", "--config", agent.config)
    assert (code, "Nothing is approved" in out) == (1, True)
    repair()
    agent.wait_for(lambda: azure.world.approvals)
    assert agent.stop() == 0


def test_decision_is_rejected_while_other_users_can_write_to_its_key_file(agent, azure, tmp_path, free_port):
    with PortalStub(tmp_path / "portal") as portal:
        configure(agent, azure, portal.toml(), free_port)
        (file,) = (Path(table["public_key_file"]) for table in portal.key_tables())
        file.chmod(0o666)
        agent.start("--log-format", "json")
        azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: transitions(agent) == ["scheduled"])
        record = decode_record(agent.out.read_text().splitlines()[0])
        portal.decide(record.event, vm_id=record.vm.vm_id)
        agent.wait_for(lambda: result(agent) == ["unsafe_files"])
        assert str(file) in agent.records[-1]["approval"]["reason"]
        assert not azure.world.approvals
    assert agent.stop() == 0


# Secrets that other users can read.


def test_token_readable_by_other_users_causes_a_warning(agent, azure, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret-4711")
    sink = f'[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\nbearer_token_file = "{token}"\n'
    agent.configure(azure.endpoint, sink)
    group = (
        0 if os.geteuid() else 4711
    )  # Root does not warn about groups, because it does not know the groups of the agent's user.
    for mode, is_warned in ((0o644, True), (0o640, False), (0o600, False)):
        token.chmod(mode)
        if group:
            os.chown(token, -1, group)
        _, out, _ = agent.call("check-config", "--config", agent.config)
        assert ("Warning: sinks[0].bearer_token_file" in out, str(token) in out) == (is_warned, is_warned)
    token.chmod(0o604)
    agent.start()
    agent.wait_for(lambda: "The agent is running" in agent.log)
    assert f"{token} contains a secret, and other users can read it: its mode is 0604." in agent.log
    assert f"Run chmod o-r {token}, and" in agent.log
    assert "secret-4711" not in agent.log
