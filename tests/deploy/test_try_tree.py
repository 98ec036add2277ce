"""The installer's test of a running agent: which reasons roll an upgrade back."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.testing.http_contract import Answer, HttpPeer

PROGRAM = Path(__file__).parents[2] / "deploy" / "systemd" / "try_tree.py"
REFUSING = "Sink hook needs attention. `status` shows its last error."
DEAD = "Sink hook is stuck: its oldest record has waited 512 s."
OTHER_SINK = "Sink other needs attention. `status` shows its last error."
NO_POLL = "IMDS has not responded yet."
SILENT = "The last response from IMDS was 40 s ago."
NOT_JSON = "The last good response from IMDS was 40 s ago: The body is not JSON."
NOT_JSON_YET = "IMDS returned no document: The body is not JSON."
NO_EVENTS = "IMDS returned no document: The document has no list of events."
BEHIND = "The outbox is not saved for 12 s: the disk is full."

pytestmark = pytest.mark.deploy


@pytest.fixture
def try_tree(tmp_path):
    """Run the program against an agent that is not ready because of *reasons*."""
    reasons = []

    def readyz(_request):
        body = {
            "status": "not_ready" if reasons else "ready",
            "reasons": reasons,
            "version": "0.1.0",
            "stream_id": None,
            "state_directory": "/state",
            "outbox_behind": None,
            "outbox_behind_seconds": 0.0,
            "vm": None,
            "imds": "http://169.254.169.254",
            "configuration": "",
            "last_good_poll_at": None,
            "last_good_poll_seconds_ago": None,
            "sinks": {},
        }
        return Answer(status=503 if reasons else 200, body=json.dumps(body).encode())

    config = tmp_path / "config.toml"
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "systemctl").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SCHEDULED_EVENTS_BRIDGE_CONFIG": str(config),
    }

    def run(*arguments, not_ready=()):
        reasons[:] = not_ready
        command = [sys.executable, PROGRAM, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    with HttpPeer() as agent:
        agent.reply(readyz)
        config.write_text(f'[status]\nlisten = "{agent.address.authority}"\n')
        yield run


def test_reasons_of_the_running_agent_are_printed(try_tree):
    assert try_tree("reasons", not_ready=[REFUSING, NO_POLL]).stdout.splitlines() == [REFUSING, NO_POLL]
    assert try_tree("reasons").stdout == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], []),
        ([REFUSING], [REFUSING]),
        ([DEAD], [REFUSING]),
        ([REFUSING], [DEAD, REFUSING]),
        ([DEAD], []),
        ([], [DEAD]),
        ([SILENT], [NO_POLL]),
        ([NOT_JSON], [NOT_JSON_YET]),
    ],
    ids=[
        "ready",
        "refusing",
        "dead, then refusing",
        "two reasons",
        "recovered",
        "not stuck yet",
        "silent IMDS",
        "invalid",
    ],
)
def test_problem_that_existed_before_does_not_prevent_an_upgrade(try_tree, tmp_path, before, after):
    (tmp_path / "before").write_text("".join(f"{reason}\n" for reason in before))
    assert try_tree("ready", "5", tmp_path / "before", not_ready=after).returncode == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (REFUSING, [NO_POLL]),
        (REFUSING, [BEHIND]),
        (REFUSING, [REFUSING, OTHER_SINK]),
        (REFUSING, [REFUSING, NO_POLL]),
        (SILENT, [NO_EVENTS]),
        (NOT_JSON, [NO_EVENTS]),
    ],
)
def test_new_problem_prevents_an_upgrade(try_tree, tmp_path, before, after):
    (tmp_path / "before").write_text(f"{before}\n")
    done = try_tree("ready", "0.5", tmp_path / "before", not_ready=after)
    assert (done.returncode, done.stderr.splitlines()) == (1, after)


def test_installer_and_ansible_role_compare_reasons_in_the_same_way():
    role = PROGRAM.parents[1] / "ansible/roles/scheduled_events_bridge/vars/main.yml"
    substitutions = re.findall(r"'regex_replace', '(.+?)', '(.*?)'", role.read_text(encoding="utf-8"))
    found = re.search(r"SAME_REASON = (.+)", PROGRAM.read_text(encoding="utf-8"))
    assert found
    unescaped = [tuple(text.replace("\\\\", "\\") for text in pair) for pair in substitutions]
    assert tuple(unescaped) == ast.literal_eval(found[1])
    ignored = re.search(r"OLDER_THAN_THE_UPGRADE = (.+)", PROGRAM.read_text(encoding="utf-8"))
    assert ignored
    assert f"reject('search', '{ast.literal_eval(ignored[1])}')" in role.read_text(encoding="utf-8")
