"""`run` refuses to start next to the service's agent, and other commands name the service's state directory."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from readable_source import readable_source

#: A documentation address (RFC 5737). It is not an address of this machine, and no server responds there.
ELSEWHERE = "http://192.0.2.1"
SERVICE = "/var/lib/scheduled-events-bridge"
#: Runs a command next to a service whose agent holds the lock of its state directory.
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
#: A configuration with a state directory that differs from the directory of the service.
CONFIG = """
[imds]
endpoint = "{endpoint}"
timeout_seconds = 0.2
[state]
directory = "{directory}"
[status]
listen = ""
[approval]
"""


def as_a_login(agent, *arguments, user="nobody"):
    """Run a command next to the service's agent; return its exit code, standard output, and standard error."""
    if sys.platform == "win32" or os.geteuid() != 0:
        pytest.skip("only root can give a process its own /var/lib")
    env = {name: value for name, value in agent.env.items() if name != "XDG_STATE_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", AS_A_LOGIN, *map(str, arguments)],
        check=False, capture_output=True, text=True, cwd="/", timeout=60,
        env={**env, "AS": user, "PYTHONPATH": readable_source()},
    )  # fmt: skip
    if done.returncode == 99:
        pytest.skip("no mount namespaces")
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def config():
    """A configuration that every user can read, unlike the directories of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "config.toml")
        path.write_text(CONFIG.format(endpoint=ELSEWHERE, directory=f"{folder}/own"))
        yield path


@pytest.mark.parametrize("user", ["nobody", "root"])
def test_run_exits_73_next_to_the_agent_of_the_service(agent, config, user):
    code, out, err = as_a_login(agent, "run", "--config", config, user=user)
    assert (code, out) == (73, ""), err
    assert f"The service's agent already watches this VM, with the state directory {SERVICE}" in err
    assert "--allow-second-agent" in err


@pytest.mark.parametrize("arguments", [["--allow-second-agent"], []], ids=["with the option", "with a simulator"])
def test_run_starts_next_to_the_service_with_the_option_or_a_simulator(agent, config, arguments):
    endpoint = ELSEWHERE if arguments else "http://127.0.0.1:9"
    # A file in place of the state directory ends the run after the check.
    config.write_text(CONFIG.format(endpoint=endpoint, directory=config / "state"))
    code, _, err = as_a_login(agent, "run", "--config", config, *arguments, user="root")
    assert (code, "cannot be created" in err) == (73, True)


@pytest.mark.parametrize(
    ("user", "advice"),
    [("nobody", "Run the command as root, with sudo."), ("root", f"Use --state-directory {SERVICE}.")],
)
def test_other_commands_report_the_state_directory_of_the_service(agent, config, user, advice):
    for command in (("status",), ("events",), ("approve", "A")):
        code, out, err = as_a_login(agent, *command, "--config", config, user=user)
        assert (code, out) == (1, ""), (command, err)
        assert f"The default state directory of the service is {SERVICE}. {advice}" in err


#: Runs `status` on a machine with an installed service that was never started.
NEVER_STARTED = """
import ctypes, os, sys
import bridge.cli.commands, bridge.cli.status, encodings.utf_8_sig
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(99)
for place in (b"/etc", b"/var/lib"):
    if libc.mount(b"tmpfs", place, b"tmpfs", 0, None):
        sys.exit(99)
os.makedirs("/etc/systemd/system")
open("/etc/systemd/system/scheduled-events-bridge.service", "w").close()
sys.argv = ["scheduled-events-bridge", "status"]
bridge.cli.main()
"""


def test_status_recommends_starting_a_service_that_never_ran(agent_env):
    if sys.platform == "win32" or os.geteuid() != 0:
        pytest.skip("only root can give a process its own /var/lib")
    env = {name: value for name, value in agent_env.items() if name != "STATE_DIRECTORY"}
    done = subprocess.run(
        [sys.executable, "-c", NEVER_STARTED], check=False, capture_output=True, text=True, timeout=60, env=env
    )
    if done.returncode == 99:
        pytest.skip("no mount namespaces")
    assert done.returncode == 1
    assert "Start the service with `systemctl start scheduled-events-bridge`" in done.stderr
