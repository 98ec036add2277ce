"""`check-config`: everything that is wrong, at once, with its own exit code; with --connect every destination too."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from answering import answering
from portal_stub import PortalStub
from private_ca import PrivateCa

from bridge.approval.signing import generate_key
from bridge.testing import EventSpec, Simulator
from bridge.testing.http_contract import HttpPeer
from bridge.testing.peers import nobody

if sys.platform != "win32":
    import pwd

REMOTE = '[approval.remote]\nurl = "https://portal.example.net/api/v1"\n'
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a directory to another user"
)


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def check(agent):
    """Check a configuration in `agent.directory`; return the exit code and the lines of standard output."""

    def check(text, *arguments):
        agent.config.write_text(text)
        code, out, err = agent.call("check-config", "--config", agent.config, *arguments)
        assert err == "" or code in (2, 78), err
        return code, out.splitlines()

    return check


@contextlib.contextmanager
def serving_options(status):
    """Answer OPTIONS with *status*; yield the URL."""

    with answering(lambda _: (status, b"")) as port:
        yield f"http://127.0.0.1:{port}"


def state(agent, more=""):
    return f'[state]\ndirectory = "{agent.state}"\n{more}\n'


def starting(lines, word):
    return [line.partition(": ")[2] for line in lines if line.startswith(f"{word}: ")]


def webhook(name, *lines, url="http://127.0.0.1:9/hook"):
    return "\n".join(['[[sinks]]\ntype = "webhook"', f'name = "{name}"', f'url = "{url}"', *lines, ""])


LIFE = ["scheduled", "started", "completed", "canceled", "ended"]


def pagerduty(*lines):
    """A table for PagerDuty whose key any environment has."""
    return "\n".join(
        ['[[sinks]]\ntype = "webhook"\nformat = "pagerduty"\nrouting_key_env = "PATH"', *lines, ""],
    )


def test_a_configuration_with_nothing_wrong_is_exit_0_and_makes_nothing(agent, check):
    code, lines = check(state(agent))
    assert (code, lines[0]) == (0, "The configuration is right.")
    assert str(agent.state) in lines[1]
    assert (starting(lines, "Wrong"), starting(lines, "Warning")) == ([], [])
    assert not agent.state.exists()


def test_everything_that_is_wrong_on_this_machine_is_said_at_once(agent, check):
    folder = agent.directory
    (folder / "empty").write_text("# nothing but a comment\n\n")
    (folder / "latin").write_bytes(b"\xff\xfe")
    (folder / "no-pem").write_text("no certificate\n")
    (folder / "no-program").write_text("#!/bin/sh\n")
    code, lines = check(
        state(agent)
        + webhook("missing", f'bearer_token_file = "{folder / "nowhere"}"')
        + webhook("empty", f'secret_file = "{folder / "empty"}"')
        + webhook("variable", 'bearer_token_env = "NO_SUCH_VARIABLE"')
        + webhook("latin", f'headers_file = "{folder / "latin"}"')
        + webhook("authorities", f'ca_file = "{folder / "no-pem"}"')
        + webhook("certificate", f'client_cert_file = "{folder / "no-pem"}"')
        + f'[[sinks]]\ntype = "command"\nname = "drain"\ncommand = ["{folder / "no-program"}"]\n'
        + '[[sinks]]\ntype = "command"\nname = "path"\ncommand = ["no-such-program-at-all"]\n'
        + '[approval]\n[[approval.rules]]\nname = "r"\nevent_types = ["Freeze"]\naction = "approve"\n'
        + f'command = ["{folder / "nowhere"}"]\n'
    )
    assert code == 1
    assert lines[0] == "The configuration can be used, but 9 things are wrong here."
    wrong = starting(lines, "Wrong")
    for where, said in (
        ("Sink missing", "nowhere of bearer_token_file cannot be read: No such file or directory."),
        ("Sink empty", "empty of secret_file is empty."),
        ("Sink variable", "The environment variable NO_SUCH_VARIABLE of bearer_token_env is empty."),
        ("Sink latin", "it is no UTF-8 text"),
        ("Sink authorities", "ca_file: "),
        ("Sink certificate", "client_cert_file: "),
        ("Sink drain", "is not executable"),
        ("Sink path", "No program called 'no-such-program-at-all'"),
        ("Rule r", "nowhere does not exist. Install it, or change `command`."),
    ):
        assert [line for line in wrong if line.startswith(f"{where}: ") and said in line], (where, wrong)
    assert len(wrong) == 9


def test_a_rules_program_that_cannot_be_run_is_told_from_one_that_is_not_there(agent, check):
    program = agent.directory / "drain"
    program.touch(mode=0o644)
    code, lines = check(
        state(agent)
        + f'[[approval.rules]]\nname = "r"\nevent_types = ["Freeze"]\naction = "approve"\ncommand = ["{program}"]\n'
    )
    (wrong,) = starting(lines, "Wrong")
    assert code == 1
    assert "is not executable for " in wrong
    assert wrong.endswith(". Make it so, or change `command`.")
    assert "Approvals: 1 rule, no portal." in lines


@pytest.mark.parametrize(
    ("program", "said"),
    [("nowhere", "does not exist. Install it, or change `command`."), ("plain", "is not executable for ")],
)
def test_the_program_that_the_portals_approvals_wait_for_is_looked_for_too(agent, check, program, said):
    (agent.directory / "plain").touch(mode=0o644)
    pair = generate_key(agent.directory / "portal.key")
    code, lines = check(
        state(agent)
        + f'[approval.remote]\nurl = "http://127.0.0.1:9/api"\ncommand = ["{agent.directory / program}"]\n'
        + f'[[approval.remote.keys]]\nkid = "k"\napprover = "a"\npublic_key_file = "{pair.public_key_file}"\n'
    )
    (wrong,) = starting(lines, "Wrong")
    assert code == 1
    assert wrong.startswith("Portal: ")
    assert said in wrong
    assert f"Portal http://127.0.0.1:9/api: 1 of a must approve, and {agent.directory / program} must exit 0." in lines


def test_configuration_in_force_and_version_are_said(agent, check):
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


@pytest.mark.skipif(sys.platform == "win32", reason="a variable's name may hold $ nowhere else")
def test_a_variable_named_with_its_dollar_is_said(agent, check):
    code, lines = check(state(agent) + webhook("a", 'secret_env = "$TOKEN"'))
    assert code == 1
    assert [each for each in starting(lines, "Warning") if "secret_env begins with $" in each]


def test_what_a_sink_gets_is_said_in_words(check, agent):
    _, lines = check(state(agent) + webhook("a") + webhook("b", 'transitions = ["started"]'))
    assert "Sink a (webhook): scope mine; every transition, type and source." in lines
    assert "Sink b (webhook): scope mine; transitions started." in lines


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (webhook("a", 'client_cert_file = "/nowhere/cert.pem"'), 78),
        (REMOTE + '[[approval.remote.keys]]\nkid = "k"\napprover = "p"\npublic_key_file = "/nowhere/k.pub"\n', 1),
        (webhook("a", 'secret_file = "/nowhere/secret"'), 1),
    ],
)
def test_a_certificate_that_is_not_there_is_a_mistake_and_a_public_key_or_a_secret_may_come_later(
    agent, check, text, code
):
    assert check(state(agent) + text)[0] == code


@needs_root
def test_root_is_told_to_check_as_the_owner_of_the_state_directory(agent, check):
    (agent.directory / "token").write_text("secret-4711")
    (agent.directory / "token").chmod(0o640)
    text = state(agent) + webhook("a", f'bearer_token_file = "{agent.directory / "token"}"')
    for make in (lambda: None, agent.state.mkdir):  # not made yet, and root's own
        make()
        code, lines = check(text)
        assert (code, starting(lines, "Warning")) == (0, [])
        assert lines[1].endswith("Looked at as root.")
    user = pwd.getpwnam("nobody")
    os.chown(agent.state, user.pw_uid, user.pw_gid)
    code, lines = check(text)
    (warning,) = starting(lines, "Warning")
    assert code == 0
    assert "the state directory belongs to nobody" in warning
    again = " ".join(agent.command("check-config", "--config", agent.config))
    assert warning.endswith(f": runuser -u nobody -- {again}")


def test_what_is_there_is_not_complained_of(agent, check):
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
    assert (code, starting(lines, "Wrong")) == (0, [])
    assert not [line for line in lines if "secret-token" in line]


def test_what_run_refuses_is_exit_78_for_both(agent, check):
    text = state(agent) + webhook("a", 'ca_file = "/nowhere/ca.pem"')
    code, lines = check(text)
    assert (code, lines) == (78, [])
    assert agent.call("run", "-c", agent.config)[0] == 78


def test_a_file_that_is_refused_is_looked_at_for_missing_files_and_open_secrets_at_once(agent):
    folder = agent.directory
    (folder / "open").write_text("token")
    (folder / "open").chmod(0o644)
    agent.config.write_text(
        "polling = 1\n"
        '[[sinks]]\ntype = "webhook"\nname = "pager"\nformat = "pagerduty"\n'
        f'routing_key_file = "{folder / "nowhere"}"\ntimeout_seconds = -1\nunknown_file = "/of/nobody"\n'
        + webhook("sound", 'headers = {Authorization = "Basic c2VjcmV0"}', f'bearer_token_file = "{folder / "open"}"')
        + webhook("tls", f'ca_file = "{folder / "no-ca"}"')
        + '[approval.remote]\nurl = "https://portal.example.net/api/v1"\ntoken_env = "NO_SUCH_VARIABLE"\nwait = 1\n'
        + f'[[approval.remote.keys]]\nkid = "k"\napprover = "a"\npublic_key_file = "{folder / "no-key"}"\n'
    )
    code, out, err = agent.call("check-config", "--config", agent.config, "--connect")
    lines = err.splitlines()
    assert (code, out) == (78, "")
    assert [line for line in lines if line.startswith("polling is no known key")]
    assert [line for line in lines if line.startswith("approval.remote.wait is no known key")]
    for said in (
        f"sinks[0] (sink 'pager'): The file {folder / 'nowhere'} of routing_key_file cannot be read",
        "approval.remote: The environment variable NO_SUCH_VARIABLE of token_env is empty",
        f"approval.remote.keys[0]: The file {folder / 'no-key'} of public_key_file cannot be read",
        "Warning: sinks[1] (sink 'sound'): headers has Authorization",
        f"Warning: sinks[1] (sink 'sound'): bearer_token_file: {folder / 'open'} holds a secret",
        "No destination was tried",
    ):
        assert [line for line in lines if line.startswith(said)], (said, err)
    assert err.count(str(folder / "no-ca")) == 1, "said twice, as a mistake and as a file"
    assert "c2VjcmV0" not in err
    assert "/of/nobody" not in err


def test_what_is_only_wrong_on_this_machine_does_not_keep_run_from_starting(agent, check, azure):
    text = f'[imds]\nendpoint = "{azure.endpoint}"\n[status]\nlisten = ""\n' + state(agent)
    text += webhook("a", 'bearer_token_file = "/nowhere/token"')
    assert check(text)[0] == 1
    agent.start()
    agent.wait_for(lambda: "The agent is running." in agent.log)
    code, lines = check(text)
    assert code == 1
    assert "; an agent runs on it." in lines[1]
    assert agent.stop() == 0


def test_a_state_directory_that_cannot_be_made_or_is_none_is_said(agent, check):
    file = agent.directory / "file"
    file.touch()
    for directory in (file, file / "below"):
        code, lines = check(f'[state]\ndirectory = "{directory}"')
        assert code == 1
        assert "is no directory" in starting(lines, "Wrong")[0]
        assert not agent.state.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[sinks]]\ntype = "stdout"\nheartbeat = true\n', "heartbeat.interval_seconds is 0"),
        ("[heartbeat]\ninterval_seconds = 300\n", "no sink has heartbeat = true"),
        ('[state]\ndirectory = "state"\n', "depends on where the agent is started"),
        ('[[sinks]]\ntype = "stdout"\ntransitions = ["test"]\n', "never an event"),
        ('[[sinks]]\ntype = "stdout"\ntransitions = ["approved", "approval_failed"]\n', "there is no [approval] table"),
        ('[[sinks]]\ntype = "stdout"\ntransitions = ["scheduled", "heartbeat"]\n', "does nothing by itself"),
        ('[status]\nlisten = "0.0.0.0:9464"\n', "There is no password"),
        ('[[sinks]]\ntype = "stdout"\nscope = "all"\n', "events of other VMs"),
        ('[[sinks]]\ntype = "stdout"\nspeak = "first"\n', "whose first VM runs no agent nobody tells"),
        (
            '[[sinks]]\ntype = "stdout"\n[[sinks]]\ntype = "command"\nspeak = "first"\ncommand = ["true"]\n',
            "runs its program on the first VM in Resources alone",
        ),
        (
            webhook("a", 'event_types = ["Freze2"]'),
            "'Freze2', an event type that Azure has never sent. Did you mean 'Freeze'?",
        ),
        (webhook("a", 'event_sources = ["Operator"]'), "'Operator', an event source that Azure has never sent."),
        (
            '[[approval.rules]]\nname = "r"\nevent_types = ["Hibernate"]\naction = "hold"\n',
            "Rule r: event_types names 'Hibernate', an event type that Azure has never sent.",
        ),
        (webhook("a", 'headers = {X-Team = "${TEAM}"}'), "Sink a: headers.X-Team holds what reads like a variable"),
        ('[labels]\nteam = "$TEAM"\n', "labels.team holds what reads like a variable, and none is filled in here"),
        (webhook("a", url="https://h/${HOOK}"), "url holds what reads like a variable"),
        (webhook("a", url="https://h/${HOOK}"), "or name the variable with url_env."),
        ('[labels]\npath = "C:\\temp"\n', "labels.path holds a tab or another control character"),
        (webhook("a", 'headers = {Authorization = "Basic c2VjcmV0OnNlY3JldA=="}'), "headers has Authorization"),
        (webhook("a", 'headers = {X-Api-Key = "c2VjcmV0OnNlY3JldA=="}'), "headers has X-Api-Key"),
        (webhook("a", url="https://example.net/x?token=c2VjcmV0"), "Sink a: url looks as if it carried a secret"),
    ],
)
def test_settings_that_do_nothing_or_surprise_are_warned_of_and_do_not_fail(agent, check, text, said):
    agent.env["STATE_DIRECTORY"] = str(agent.state)
    code, lines = check(text)
    (warning,) = starting(lines, "Warning")
    assert said in warning
    assert code == 0
    assert not [line for line in lines if "c2VjcmV0" in line]


@pytest.mark.parametrize(
    "text",
    [
        '[heartbeat]\ninterval_seconds = 9\n[[sinks]]\ntype = "stdout"\nheartbeat = true\ntransitions = ["started"]\n',
        '[approval]\n[[sinks]]\ntype = "stdout"\ntransitions = ["approved"]\n',
        '[status]\nlisten = "[::1]:9464"\n',
        webhook("a", 'headers = {X-Team = "payments", Idempotency-Key = "none"}'),
        webhook("a", 'event_types = ["Freeze", "Preempt"]', 'event_sources = ["User"]', url="https://h/a%C3%A9%20$1"),
        "[[sinks]]\ntype = 'command'\ncommand = ['/bin/sh', '-c', 'echo $HOME ${HOME}']\n",
        "[labels]\npath = 'C:\\temp'\nprice = '5 $'\n",
        webhook("a", url="https://example.net/token/hook?team=payments&key=disk&code=200"),
        webhook("a", 'format = "alertmanager"'),
        webhook("a", 'format = "alertmanager"', f"transitions = {LIFE}", 'event_types = ["Reboot"]'),
        pagerduty(f"transitions = {LIFE}"),
        webhook("a", 'transitions = ["started"]', "max_age_seconds = 900"),
        '[[sinks]]\ntype = "stdout"\n' + webhook("chat", 'speak = "first"'),
    ],
)
def test_settings_that_make_sense_are_not_warned_of(agent, check, text):
    agent.env["STATE_DIRECTORY"] = str(agent.state)
    code, lines = check(text)
    assert (code, starting(lines, "Warning")) == (0, [])


def test_connecting_says_one_line_a_destination_and_what_is_wrong_with_each(agent, check, azure):
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
        "reached; this VM is vm_0. Scheduled Events were not asked for: the first request turns them on for this VM."
    ]
    (said,) = starting(lines, "dead")
    assert said.startswith("FAILED: ")
    assert "refused" in said
    assert starting(lines, "broken") == ["not tried: see above what it lacks."]
    assert starting(lines, "mine") == ["cannot be tried without writing to it; `send-test mine` sends it a record."]
    assert starting(lines, "stdout") == ["nothing to try: it writes to the agent's own standard output."]
    assert starting(lines, "drain") == ["its program is there; it was not run."]
    assert lines[-1] == "Not as it must be from here: dead."


def test_connecting_claims_nothing_that_it_did_not_try(agent, check, azure):
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
        asked = {(request.method, request.path, request.body) for request in peer.requests}
    assert code == 0
    assert lines[0] == "The configuration is right. What answers from here is said at the end."
    assert not [line for line in lines if line.startswith("Not as it must be")]
    assert starting(lines, "events") == [
        "a server answers. Whether it takes records from here was not tried; `send-test events` sends one."
    ]
    assert starting(lines, "pager") == [
        "a server answers. Whether it takes events with this routing key was not tried; `send-test pager` sends one."
    ]
    assert starting(lines, "otlp") == ["it took a request without records; `send-test otlp` sends one."]
    assert asked == {("OPTIONS", "/hook", b""), ("OPTIONS", "/v2/enqueue", b""), ("POST", "/v1/logs", b"")}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 501, 503])
def test_what_refuses_is_never_called_reached(check, agent, azure, status):
    with serving_options(status) as url:
        code, lines = check(
            f'[imds]\nendpoint = "{azure.endpoint}"\n{state(agent)}' + webhook("events", url=f"{url}/hook"), "--connect"
        )
    (said,) = starting(lines, "events")
    assert code == (0 if status in {400, 405, 501} else 1)
    assert f"answered {status} to OPTIONS" in said
    assert "reached" not in said
    assert "`send-test" in said


def test_a_dead_proxy_is_named_and_not_the_destination(check, agent, azure):
    with nobody() as address:
        proxy = f"http://{address.authority}"
        sinks = [
            webhook(name, f'proxy = "{proxy}"', url=f"{scheme}://hook.invalid/services/T0/secret")
            for name, scheme in (("plain", "http"), ("tls", "https"))
        ]
        code, lines = check(f'[imds]\nendpoint = "{azure.endpoint}"\n{state(agent)}' + "".join(sinks), "--connect")
    assert code == 1
    for name, scheme in (("plain", "http"), ("tls", "https")):
        (said,) = starting(lines, name)
        assert said.startswith(f"FAILED: {scheme}://hook.invalid was not tried: the proxy {proxy} does not answer: ")


def test_connecting_does_not_turn_scheduled_events_on_but_asks_for_them_beside_an_agent(agent, check, azure):
    text = f'[imds]\nendpoint = "{azure.endpoint}"\n[status]\nlisten = ""\n' + state(agent)
    assert check(text, "--connect")[0] == 0
    assert not [each for each in azure.requests if "scheduledevents" in each.path]
    azure.world.add_event(EventSpec(event_type="Freeze"))
    agent.start()
    agent.wait_for(lambda: agent.records)
    code, lines = check(text, "--connect")
    assert (code, starting(lines, "IMDS")) == (0, ["reached; this VM is vm_0, with 1 scheduled event."])


def test_no_metadata_service_is_said_with_what_to_do(agent, check):
    code, lines = check(f'[imds]\nendpoint = "http://127.0.0.1:9"\n{state(agent)}', "--connect")
    (said,) = starting(lines, "IMDS")
    assert code == 1
    assert said.startswith("FAILED: The metadata service at http://127.0.0.1:9 gave no answer")
    assert "imds.endpoint can name a simulator" in said
    assert "asked again" not in said


def test_what_stands_in_place_of_the_metadata_service_is_quoted_as_a_sentence_of_its_own(agent, check):
    with answering(lambda _: (403, b"denied destination")) as port:
        code, lines = check(f'[imds]\nendpoint = "http://127.0.0.1:{port}"\n{state(agent)}', "--connect")
    (said,) = starting(lines, "IMDS")
    assert code == 1
    assert "denied destination. On Azure, it must be reachable" in said


def test_silent_peers_are_tried_at_the_same_time(agent, check):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sinks = "".join(webhook(f"s{number}", "timeout_seconds = 4", url=url) for number in range(6))
        began = time.monotonic()
        code, lines = check(f'[imds]\nendpoint = "{url}"\ntimeout_seconds = 4\n{state(agent)}{sinks}', "--connect")
        took = time.monotonic() - began
    assert code == 1
    assert len([line for line in lines if ": FAILED: " in line]) == 7
    assert took < 18  # one after the other they would take 28


def test_the_portal_is_tried_and_keeps_its_decisions(agent, check, azure):
    portal = PortalStub(agent.directory / "portal", bearer="portal-token-4711")
    try:
        token = agent.directory / "token"
        token.write_text("portal-token-4711")
        text = f'[imds]\nendpoint = "{azure.endpoint}"\n{state(agent)}[approval]\n{portal.toml(token_file=str(token))}'
        code, lines = check(text, "--connect")
        assert (code, starting(lines, "Portal")) == (0, ["reached; 0 decisions for this VM."])
        token.write_text("another-token-4712")
        code, lines = check(text, "--connect")
        (said,) = starting(lines, "Portal")
        assert code == 1
        assert said.startswith("FAILED: ")
        assert "401" in said
        assert "token-471" not in said
    finally:
        portal.close()


def test_a_secret_in_the_file_is_answered_with_both_keys_that_keep_it_out(agent):
    agent.config.write_text(
        '[[sinks]]\ntype = "eventhubs"\ncredential = "connection_string"\nconnection_string = "x"\n'
    )
    code, _, err = agent.call("check-config", "--config", agent.config)
    assert code == 78
    assert "write connection_string_file or connection_string_env instead" in err


def test_a_file_that_is_not_there_is_78_and_a_directory_wrong_usage(agent):
    code, out, err = agent.call("check-config", "-c", agent.directory / "nowhere.toml")
    assert (code, out) == (78, "")
    assert "does not exist" in err
    for command in ("check-config", "run", "status", "events"):
        code, out, err = agent.call(command, "-c", agent.directory)
        assert (code, out) == (2, "")
        assert f"is a directory; name the file itself, such as {agent.directory / 'config.toml'}" in err
    agent.env["SCHEDULED_EVENTS_BRIDGE_CONFIG"] = str(agent.directory)
    code, out, err = agent.call("check-config")
    assert (code, out) == (78, "")
    assert "Is a directory" in err


def test_what_the_environment_sets_is_named_and_so_is_a_variable_that_is_misspelt(agent, check):
    agent.env |= {
        "SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN": "127.0.0.1:9463",
        "SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY": str(agent.state),
        "SCHEDULED_EVENTS_BRIDGE_STATUS_LISTN": "127.0.0.1:9462",
    }
    code, lines = check('[state]\ndirectory = "/of/the/file"\n')
    assert code == 0, lines
    assert lines[1].startswith(f"State: {agent.state}")
    assert starting(lines, "From the environment, before the file") == [
        "status.listen is '127.0.0.1:9463' ($SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN).",
        f"state.directory is {str(agent.state)!r} ($SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY).",
    ]
    assert [each for each in starting(lines, "Warning") if "SCHEDULED_EVENTS" in each] == [
        "$SCHEDULED_EVENTS_BRIDGE_STATUS_LISTN sets nothing. Did you mean $SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN?"
    ]


def test_wrong_value_of_the_environment_is_a_wrong_configuration(agent):
    agent.env["SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN"] = "everywhere"
    agent.config.write_text("")
    code, _, err = agent.call("run", "--config", agent.config)
    assert (code, err.partition(" ")[0]) == (78, "$SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN")
