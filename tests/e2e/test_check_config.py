"""`check-config` reports all problems at once with their exit code, and with --connect also each destination."""

import contextlib
import json
import os
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from portal_stub import PortalStub
from private_ca import PrivateCa

from bridge.testing import EventSpec
from bridge.testing.http_contract import HttpPeer

if sys.platform != "win32":
    import pwd

EVENT_HUBS = '[[sinks]]\ntype = "eventhubs"\neventhub = "e"\nfully_qualified_namespace = "{}"'
REMOTE = '[approval.remote]\nurl = "https://portal.example.net/api/v1"\n'
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a directory to another user"
)


@pytest.fixture
def check(agent):
    """Check a configuration in `agent.directory`; return the exit code and the lines of standard output."""

    def check(text, *arguments):
        agent.config.write_text(text)
        code, out, err = agent.call("check-config", "--config", agent.config, *arguments)
        assert err == "" or code in (2, 78), err
        return code, out.splitlines()

    return check


def state(agent, more=""):
    return f'[state]\ndirectory = "{agent.state}"\n{more}\n'


def starting(lines, word):
    return [line.partition(": ")[2] for line in lines if line.startswith(f"{word}: ")]


def webhook(name, *lines, url="http://127.0.0.1:9/hook"):
    return "\n".join(['[[sinks]]\ntype = "webhook"', f'name = "{name}"', f'url = "{url}"', *lines, ""])


def pagerduty(*lines):
    """A table for PagerDuty with a key from a variable that every environment has."""
    return "\n".join(
        ['[[sinks]]\ntype = "webhook"\nformat = "pagerduty"\nrouting_key_env = "PATH"', *lines, ""],
    )


def test_valid_configuration_exits_0_and_creates_no_files(agent, check):
    code, lines = check(state(agent))
    assert (code, lines[0]) == (0, "The configuration is valid.")
    assert str(agent.state) in lines[1]
    assert (starting(lines, "Problem"), starting(lines, "Warning")) == ([], [])
    assert not agent.state.exists()


def test_all_problems_of_the_machine_are_reported_in_one_run(agent, check):
    folder = agent.directory
    (folder / "empty").write_text("# nothing but a comment\n\n")
    (folder / "latin").write_bytes(b"\xff\xfe")
    (folder / "no-program").write_text("#!/bin/sh\n")
    code, lines = check(
        state(agent)
        + webhook("missing", f'bearer_token_file = "{folder / "nowhere"}"')
        + webhook("empty", f'secret_file = "{folder / "empty"}"')
        + webhook("variable", 'bearer_token_env = "NO_SUCH_VARIABLE"')
        + webhook("latin", f'headers_file = "{folder / "latin"}"')
        + f'[[sinks]]\ntype = "command"\nname = "drain"\ncommand = ["{folder / "no-program"}"]\n'
        + '[[sinks]]\ntype = "command"\nname = "path"\ncommand = ["no-such-program-at-all"]\n'
        + '[approval]\n[[approval.rules]]\nname = "r"\nevent_types = ["Freeze"]\naction = "approve"\n'
        + f'command = ["{folder / "nowhere"}"]\n'
    )
    assert code == 1
    assert lines[0] == "The configuration is valid, but this machine has 7 problems."
    wrong = starting(lines, "Problem")
    for where, message in (
        ("Sink missing", "nowhere of bearer_token_file cannot be read: No such file or directory."),
        ("Sink empty", "empty of secret_file is empty."),
        ("Sink variable", "The environment variable NO_SUCH_VARIABLE of bearer_token_env is empty."),
        ("Sink latin", "it is not UTF-8 text"),
        ("Sink drain", "no-program' is missing or not executable"),
        ("Sink path", "The program 'no-such-program-at-all' is missing or not executable"),
        ("Rule r", "nowhere' is missing or not executable"),
    ):
        assert [line for line in wrong if line.startswith(f"{where}: ") and message in line], (where, wrong)
    assert len(wrong) == 7


def test_check_config_prints_the_configuration_file_and_the_version(agent, check):
    _, lines = check(state(agent))
    assert starting(lines, "Configuration") == [
        f"{agent.config}. This is version {version('scheduled-events-bridge')}."
    ]
    agent.env["STATE_DIRECTORY"] = str(agent.state)
    code, out, err = agent.call("check-config")
    if Path("/etc/scheduled-events-bridge/config.toml").exists():
        pytest.skip("This machine has a configuration of the service.")
    assert (code, err) == (0, "")
    assert starting(out.splitlines(), "Configuration")[0].startswith(
        "none, so the defaults; looked for --config, $SCHEDULED_EVENTS_BRIDGE_CONFIG and /etc/"
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (webhook("a", 'client_cert_file = "/nowhere/cert.pem"'), 78),
        (REMOTE + '[[approval.remote.keys]]\nkid = "k"\napprover = "p"\npublic_key_file = "/nowhere/k.pub"\n', 1),
        (webhook("a", 'secret_file = "/nowhere/secret"'), 1),
    ],
)
def test_missing_certificate_exits_78_but_missing_key_or_secret_exits_1(agent, check, text, code):
    assert check(state(agent) + text)[0] == code
    assert code == 1 or agent.call("run", "-c", agent.config)[0] == code


@needs_root
def test_check_as_root_prints_the_command_for_the_state_directory_owner(agent, check):
    (agent.directory / "token").write_text("secret-4711")
    (agent.directory / "token").chmod(0o640)
    text = state(agent) + webhook("a", f'bearer_token_file = "{agent.directory / "token"}"')
    for make in (lambda: None, agent.state.mkdir):  # a missing directory, and a directory of root
        make()
        code, lines = check(text)
        assert (code, starting(lines, "Warning")) == (0, [])
        assert lines[1].endswith("Checked as root.")
    user = pwd.getpwnam("nobody")
    os.chown(agent.state, user.pw_uid, user.pw_gid)
    code, lines = check(text)
    (warning,) = starting(lines, "Warning")
    assert code == 0
    assert "the state directory belongs to nobody." in warning
    assert ": runuser -u nobody -- env STATE_DIRECTORY=/" in warning


def test_usable_files_and_variables_cause_no_problems(agent, check):
    folder = agent.directory
    (folder / "token").write_text("secret-token-4711\n")
    agent.env["HOOK_TOKEN"] = "secret-token-4712"
    ca = PrivateCa(folder / "ca")
    pair = ca.issue("agent")
    code, lines = check(
        state(agent)
        + webhook("file", f'bearer_token_file = "{folder / "token"}"', f'ca_file = "{ca.ca_file}"')
        + webhook("variable", 'bearer_token_env = "HOOK_TOKEN"')
        + webhook("pair", f'client_cert_file = "{pair.cert_file}"', f'client_key_file = "{pair.key_file}"')
        + f"[[sinks]]\ntype = 'command'\nname = 'drain'\ncommand = {json.dumps([sys.executable, '-V'])}\n"
    )
    assert (code, starting(lines, "Problem")) == (0, [])
    assert not [line for line in lines if "secret-token" in line]


def test_uncreatable_state_directory_is_a_problem(agent, check):
    file = agent.directory / "file"
    file.touch()
    directories = [file, file / "below", *([Path("/proc/x")] if sys.platform == "linux" else [])]
    for directory in directories:
        code, lines = check(f'[state]\ndirectory = "{directory}"')
        (problem,) = starting(lines, "Problem")
        assert code == 1
        assert problem.startswith(f"State: The state directory {directory} cannot be created, opened, or locked: ")
        assert problem.endswith("`run` would exit with 73.")
        assert agent.call("run", "--config", agent.config)[0] == 73


def test_secret_in_a_url_causes_a_warning(agent, check):
    code, lines = check(state(agent) + webhook("a", url="https://example.net/x?token=c2VjcmV0"))
    (secret,) = starting(lines, "Warning")
    assert secret.startswith("Sink a: url seems to contain a secret.")
    assert code == 0
    assert not [line for line in lines if "c2VjcmV0" in line]


def test_rule_that_approves_every_event_causes_a_warning(agent, check):
    rules = '[[approval.rules]]\nname = "{}"\naction = "approve"\n{}\n'
    narrow = rules.format("narrow", 'event_types = ["Reboot"]') + rules.format("short", "max_duration_seconds = 0")
    code, lines = check(state(agent) + rules.format("broad", "") + narrow)
    (warning,) = starting(lines, "Warning")
    assert (code, warning.startswith("Rule broad: it approves every event")) == (0, True)


def test_connect_reports_one_line_per_destination(agent, check, azure):
    with contextlib.closing(socket.socket()) as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        module = agent.directory / "ours.py"
        module.write_text(
            "from bridge.sink import Sink\nclass Mine(Sink):\n    def send(self, batch):\n        raise OSError\n"
        )
        agent.env["PYTHONPATH"] = str(agent.directory)
        code, lines = check(
            f'[imds]\nendpoint = "{azure.endpoint}"\n{state(agent)}'
            + webhook("dead", url=dead)
            + webhook("broken", 'bearer_token_file = "/nowhere"', url=dead)
            + '[[sinks]]\ntype = "ours:Mine"\nname = "mine"\n[[sinks]]\ntype = "stdout"\n'
            + f"[[sinks]]\ntype = 'command'\nname = 'drain'\ncommand = {json.dumps([sys.executable, '-V'])}\n",
            "--connect",
        )
    assert code == 1
    assert starting(lines, "IMDS") == [
        "reached; this VM is vm_0. Scheduled Events were not requested, because the first request turns them on."
    ]
    (message,) = starting(lines, "dead")
    assert message.startswith("FAILED: ")
    assert "refused" in message
    assert starting(lines, "broken") == ["not tried because of the problem above."]
    assert starting(lines, "mine") == ["cannot be tried without writing to it; `send-test mine` sends a record."]
    assert starting(lines, "stdout") == ["not tried: it writes to the agent's standard output."]
    assert starting(lines, "drain") == ["The program exists. The check did not run the program."]
    assert lines[-1] == "Failed from this machine: dead."


def test_connect_reports_the_exact_scope_of_each_check(agent, check, azure):
    agent.env["KEY"] = "R0123456789ABCDEFGHIJKLMNOPQRSTU"
    with HttpPeer() as peer:
        url = f"http://{peer.address.authority}"
        code, lines = check(
            f'[imds]\nendpoint = "{azure.endpoint}"\n{state(agent)}'
            + webhook("events", 'bearer_token_env = "KEY"', url=f"{url}/hook")
            + pagerduty('name = "pager"', f'url = "{url}/v2/enqueue"').replace("PATH", "KEY")
            + f'[[sinks]]\ntype = "otlp"\nendpoint = "{url}"\n',
            "--connect",
        )
        sent = {(request.method, request.path, request.body) for request in peer.requests}
    assert code == 0
    assert lines[0] == "The configuration is valid. The results of the destinations follow."
    assert not [line for line in lines if line.startswith("Failed from")]
    assert starting(lines, "events") == [
        "The server responds. To test whether it accepts records, use `send-test events`."
    ]
    assert starting(lines, "pager") == [
        "The server responds. To test whether it accepts records, use `send-test pager`."
    ]
    assert starting(lines, "otlp") == [
        "The receiver accepted an empty request. To test a record, use `send-test otlp`."
    ]
    assert sent == {("OPTIONS", "/hook", b""), ("OPTIONS", "/v2/enqueue", b""), ("POST", "/v1/logs", b"")}


def test_connect_requests_scheduled_events_only_next_to_an_agent(agent, check, azure):
    text = f'[imds]\nendpoint = "{azure.endpoint}"\n[status]\nlisten = ""\n' + state(agent)
    assert check(text, "--connect")[0] == 0
    assert not [each for each in azure.requests if "scheduledevents" in each.path]
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    agent.wait_for(lambda: agent.records)
    code, lines = check(text, "--connect")
    assert (code, starting(lines, "IMDS")) == (0, ["reached; this VM is vm_0, with 1 scheduled event."])


def test_unreachable_imds_and_an_intercepting_proxy_are_reported_with_advice(agent, check):
    with HttpPeer() as proxy:
        proxy.say(403, body=b"denied destination")
        for message, endpoint in (
            ("FAILED: The metadata service at http://127.0.0.1:9 did not respond", "http://127.0.0.1:9"),
            ("denied destination. On Azure, it must be reachable", f"http://{proxy.address.authority}"),
        ):
            code, lines = check(f'[imds]\nendpoint = "{endpoint}"\n{state(agent)}', "--connect")
            (line,) = starting(lines, "IMDS")
            assert code == 1
            assert message in line
            assert "imds.endpoint can name a simulator" in line
            assert "tries again" not in line


def test_connect_checks_the_portal_and_its_token(agent, check, azure):
    portal = PortalStub(agent.directory / "portal", bearer="portal-token-4711")
    try:
        token = agent.directory / "token"
        token.write_text("portal-token-4711")
        text = f'[imds]\nendpoint = "{azure.endpoint}"\n{state(agent)}[approval]\n{portal.toml(token_file=str(token))}'
        code, lines = check(text, "--connect")
        assert (code, starting(lines, "Portal")) == (0, ["reached; 0 decisions for this VM."])
        token.write_text("another-token-4712")
        code, lines = check(text, "--connect")
        (message,) = starting(lines, "Portal")
        assert code == 1
        assert message.startswith("FAILED: ")
        assert "401" in message
        assert "token-471" not in message
    finally:
        portal.close()


def test_missing_configuration_file_or_directory_exits_78(agent):
    code, out, err = agent.call("check-config", "-c", agent.directory / "nowhere.toml")
    assert (code, out) == (78, "")
    assert "does not exist" in err
    agent.env["SCHEDULED_EVENTS_BRIDGE_CONFIG"] = str(agent.directory)
    code, out, err = agent.call("check-config")
    assert (code, out) == (78, "")
    assert "Is a directory" in err


def test_settings_from_the_environment_are_listed(agent, check):
    agent.env |= {
        "SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN": "127.0.0.1:9463",
        "SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY": str(agent.state),
    }
    code, lines = check('[state]\ndirectory = "/of/the/file"\n')
    assert code == 0, lines
    assert lines[1].startswith(f"State: {agent.state}")
    assert starting(lines, "From the environment") == [
        "status.listen is '127.0.0.1:9463' ($SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN).",
        f"state.directory is {str(agent.state)!r} ($SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY).",
    ]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            EVENT_HUBS.format("NAMESPACE.servicebus.windows.net"),
            1,
            "still contains the placeholder NAMESPACE of `init`",
        ),
        ("", 0, "has no [[sinks]] table. `scheduled-events-bridge init"),
        ('[[sinks]]\ntype = "webhook"\nurl = "https://a.example/b"\nformat = "slack"', 78, "init --sink webhook:slack"),
        ('[status]\nlisten = "127.0.0.1:99999"', 78, "the port is a number from 0 to 65535"),
        ('[[sinks]]\ntype = "webhook"\nurl = "http://a.example:99999/b"', 78, "with a port from 1 to 65535"),
        ("[approval]\n" + REMOTE, 78, "`scheduled-events-bridge keygen` creates a key pair"),
    ],
)
def test_common_mistakes_are_reported_with_the_required_action(agent, text, code, message):
    agent.config.write_text(state(agent) + text)
    done = agent.call("check-config", "--config", agent.config)
    assert done[0] == code
    assert message in " ".join("".join(done[1:]).split())
