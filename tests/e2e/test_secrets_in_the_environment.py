"""Programs that the agent starts do not get variables with secrets of the configuration or the agent's credentials."""

import json
import signal
import sys

from portal_stub import PortalStub

from bridge.testing import EventSpec

SECRETS = ("CHAT_URL", "PORTAL_TOKEN", "PAGER_KEY", "AZURE_CLIENT_SECRET")


def print_environment_to(path):
    """Return a command that writes its environment to *path*."""
    return json.dumps([sys.executable, "-c", f"import json, os; json.dump(dict(os.environ), open({str(path)!r}, 'w'))"])


def configuration(directory, portal):
    return f"""
[[sinks]]
type = "command"
command = {print_environment_to(directory / "sink.json")}
transitions = ["scheduled"]
[[sinks]]
type = "webhook"
name = "chat"
url_env = "CHAT_URL"
transitions = ["test"]
[[sinks]]
type = "webhook"
name = "pager"
format = "pagerduty"
routing_key_env = "PAGER_KEY"
transitions = ["test"]
{portal.toml(token_env="PORTAL_TOKEN")}
[[approval.rules]]
name = "drained"
action = "approve"
command = {print_environment_to(directory / "rule.json")}
"""


def test_commands_do_not_get_environment_variables_with_secrets(agent, azure, tmp_path):
    agent.env = agent.env | {name: f"https://secret.invalid/{name}" for name in SECRETS} | {"CLUSTER": "west"}
    with PortalStub(
        tmp_path / "portal"
    ) as portal:  # With a new database, rules wait for the first response of the portal.
        agent.configure(azure.endpoints["vm_0"], configuration(tmp_path, portal))
        agent.start()
        azure.world.add_event(EventSpec(event_type="Reboot"))
        agent.wait_for(lambda: azure.world.approvals)
    agent.wait_for(lambda: (tmp_path / "sink.json").exists() and (tmp_path / "sink.json").read_text().endswith("}"))
    for name in ("sink.json", "rule.json"):
        got = json.loads((tmp_path / name).read_text())
        assert (name, [each for each in SECRETS if each in got]) == (name, [])
        assert got["CLUSTER"] == "west"
        assert "SCHEDULED_EVENT_ID" in got


def test_secret_added_by_a_reload_is_hidden_from_the_next_command(agent, azure, tmp_path):
    rule = f"""
[[approval.rules]]
name = "drained"
action = "approve"
command = {print_environment_to(tmp_path / "rule.json")}
"""
    agent.env = agent.env | {"CHAT_URL": "https://secret.invalid/"}
    agent.configure(azure.endpoints["vm_0"], rule)
    agent.start()
    agent.wait_for(lambda: "The agent is running" in agent.log)
    chat = '[[sinks]]\ntype = "webhook"\nurl_env = "CHAT_URL"\ntransitions = ["test"]\n'
    agent.configure(azure.endpoints["vm_0"], f"{chat}{rule}")
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for(lambda: "The configuration was reloaded" in agent.log)
    azure.world.add_event(EventSpec(event_type="Reboot"))
    agent.wait_for(lambda: azure.world.approvals)
    assert "CHAT_URL" not in json.loads((tmp_path / "rule.json").read_text())
