"""A second agent on a VM: `run` refuses it unless told otherwise, and a login is led to the service's own agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from answering import answering
from readable_source import readable_source

from bridge.testing import Simulator

#: An address for documentation (RFC 5737): it is not this machine, and nobody answers there.
ELSEWHERE = "http://192.0.2.1"
SERVICE = "/var/lib/scheduled-events-bridge"
#: Runs a command as nobody on a machine whose service has a state directory; both only for this process.
AS_A_LOGIN = f"""
import ctypes, fcntl, os, sys
import bridge.cli.commands, bridge.cli.run, bridge.cli.status, bridge.cli.approve, bridge.cli.events, bridge.cli.outbox
import encodings.idna, encodings.utf_8_sig, sinks.stdout
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(99)
if libc.mount(b"tmpfs", b"/var/lib", b"tmpfs", 0, None):
    sys.exit(99)
os.mkdir({SERVICE!r}, 0o700)
lock = os.open({SERVICE!r}, os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_EX)
if os.environ.get("AS") == "nobody":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    os.environ["HOME"] = "/nowhere"
bridge.cli.main()
"""


@contextmanager
def another_agent(**members):
    """Answer as the /readyz of an agent with *members*; yield where."""
    body = {
        "status": "ready", "reasons": [], "version": "0.1.0", "stream_id": "s", "state_directory": SERVICE,
        "outbox_behind": None, "outbox_behind_seconds": 0.0, "oldest_pending_seconds": 0.0, "configuration": "",
        "vm": "vm_0", "imds": ELSEWHERE, "last_good_poll_at": None, "last_good_poll_seconds_ago": None, "sinks": {},
        **members,
    }  # fmt: skip

    with answering(lambda _: (200, json.dumps(body).encode())) as port:
        yield f"127.0.0.1:{port}"


def configure(agent, endpoint, listen):
    agent.config.write_text(
        f'[imds]\nendpoint = "{endpoint}"\ntimeout_seconds = 0.2\n[state]\ndirectory = "{agent.state}"\n'
        f'[status]\nlisten = "{listen}"\n'
    )


def test_second_agent_for_the_same_vm_exits_73(agent):
    with another_agent() as listen:
        configure(agent, f"{ELSEWHERE}/", listen)
        code, out, err = agent.call("run", "--config", agent.config)
    assert (code, out) == (73, "")
    assert f"The service's agent already watches this VM, with the state directory {SERVICE}. Two agents" in err
    assert "--allow-second-agent" in err
    assert not agent.state.exists()


def test_second_agent_starts_with_the_option(agent):
    with another_agent(state_directory="/somewhere/else") as listen:
        configure(agent, ELSEWHERE, listen)
        code, _, err = agent.call("run", "--config", agent.config)
        assert (code, "Another agent already watches this VM, with the state directory /somewhere/else." in err) == (
            73,
            True,
        )
        agent.start("--allow-second-agent")
        agent.wait_for(lambda: "The agent is running." in agent.log)
        assert agent.stop() == 0


@pytest.mark.parametrize(
    "members",
    [{"imds": "http://192.0.2.2"}, {"imds": "http://127.0.0.1:8169"}, {"state_directory": None}],
    ids=["another-vm", "simulator", "this-very-directory"],
)
def test_agents_of_other_vms_and_its_own_predecessor_do_not_count(agent, members):
    members = {name: value or str(agent.state) for name, value in members.items()}
    with another_agent(**members) as listen:
        configure(agent, ELSEWHERE, listen)
        agent.start()
        agent.wait_for(lambda: "The agent is running." in agent.log)
        assert agent.stop() == 0


def test_agents_on_a_simulator_run_side_by_side(agent):
    with Simulator(vms=["vm_0"], rate_limit=False) as azure, another_agent(imds=azure.endpoint) as listen:
        configure(agent, azure.endpoint, listen)
        agent.start()
        agent.wait_for(lambda: "The agent is running." in agent.log)
        assert agent.stop() == 0


def test_what_answers_there_and_is_no_agent_is_none(agent):
    with another_agent(imds=5) as listen:
        configure(agent, ELSEWHERE, listen)
        agent.start()
        agent.wait_for(lambda: "The agent is running." in agent.log)
        assert agent.stop() == 0


def as_a_login(agent, *arguments, user="nobody"):
    """Run a command where the service's directory is locked; return exit code, standard output and error."""
    if sys.platform == "win32" or os.geteuid() != 0:
        pytest.skip("only root can give a process a /var/lib of its own")
    env = {name: value for name, value in agent.env.items() if name != "XDG_STATE_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", AS_A_LOGIN, *map(str, arguments)],
        check=False, capture_output=True, text=True, cwd="/", timeout=60,
        env={**env, "AS": user, "PYTHONPATH": readable_source()},
    )  # fmt: skip
    if done.returncode == 99:
        pytest.skip("mounts cannot be made here")
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def readable():
    """Yield a configuration that everybody may read; the directories of pytest are its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        config = Path(folder, "config.toml")
        config.write_text(f'[imds]\nendpoint = "{ELSEWHERE}"\n[status]\nlisten = ""\n[approval]\n')
        yield config


def test_a_login_is_told_of_the_services_agent_and_how_to_ask_it(agent, readable):
    config = readable
    for command in (("status",), ("events",), ("approve", "A")):
        code, out, err = as_a_login(agent, *command, "--config", config)
        assert (code, out) == (1, ""), (command, err)
        assert f"The service's agent uses {SERVICE}. Run the command as root, with sudo." in err
        assert "Start the agent" not in err
    code, out, err = as_a_login(agent, "run", "--config", config)
    assert (code, out) == (73, ""), err
    assert f"The service's agent already watches this VM, with the state directory {SERVICE}" in err
    assert "sudo" in err


def test_root_on_a_directory_of_its_own_is_told_of_the_services_agent_too(agent):
    configure(agent, ELSEWHERE, "")
    code, _, err = as_a_login(agent, "run", "--config", agent.config, user="root")
    assert (code, "The service's agent already watches this VM" in err) == (73, True)
    code, _, err = as_a_login(agent, "status", "--config", agent.config, user="root")
    assert code == 1
    assert f"The service's agent uses {SERVICE}. Use --state-directory {SERVICE}." in err
