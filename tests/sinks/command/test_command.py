"""The command sink with real programs: the outcome of each exit code, and the input of the program."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bridge.config.loader import load, read
from bridge.delivery.sender import Sender
from bridge.errors import ConfigurationError, DeliveryError
from bridge.sink import ENVIRONMENT_PREFIX, DeliveryFailed, DeliveryRejected, encode, environment_of
from bridge.testing.records import sample_record
from bridge.testing.watching import in_time
from sinks.command import CommandConfig, CommandSink

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")


@pytest.fixture
def script(tmp_path):
    def write(body):
        path = tmp_path / "on-event"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def send(program, *records, **config):
    CommandSink(CommandConfig(command=(program,), **config)).send(records or (sample_record(),))


def test_exit_0_delivers_the_record_from_standard_input(script, tmp_path):
    record = sample_record()
    send(script(f"cat >{tmp_path}/got"), record)
    assert (tmp_path / "got").read_bytes() == encode(record) + b"\n"


def test_exit_75_is_retried(script):
    with pytest.raises(DeliveryFailed, match=r"^on-event requested a retry \(exit code 75\): pods are left$") as caught:
        send(script("echo pods are left >&2; exit 75"))
    assert not caught.value.needs_attention


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exit 1", "on-event failed with exit code 1."),
        ("echo a >&2; echo 'no such\tcluster' >&2; exit 3", "on-event failed with exit code 3: a no such cluster"),
        ("exit 143", "on-event failed with exit code 143."),
        ("kill -SEGV $$", "on-event was killed by SIGSEGV."),
        ("kill -9 $$", "on-event was killed by SIGKILL."),
    ],
)
def test_any_other_exit_parks_the_record(script, body, said):
    with pytest.raises(DeliveryRejected) as caught:
        send(script(body))
    assert str(caught.value) == said


@pytest.mark.parametrize("signal_name", ["TERM", "INT", "HUP"])
def test_program_stopped_by_the_service_manager_is_retried(script, signal_name):
    with pytest.raises(DeliveryFailed, match=f"was stopped by SIG{signal_name}"):
        send(script(f"trap - INT; kill -{signal_name} $$; sleep 10"))


def test_slow_program_is_killed_and_parked_before_the_host_retries(script, tmp_path):
    program = script(f"trap '' TERM; echo half done >&2; (sleep 2.3; echo alive >{tmp_path}/alive) & wait; sleep 300")
    limit = 2.0  # a tenth of it lies between the kill and the host's deadline, which is enough for a busy machine
    sender = Sender(
        lambda: CommandSink(CommandConfig(command=(program,), timeout_seconds=limit)),
        name="command",
        timeout_seconds=limit,
    )

    def send_in_vain():
        with pytest.raises(DeliveryError) as caught:
            sender.send([sample_record()])
        return caught.value

    def was_cut(error):
        return isinstance(error, DeliveryFailed)

    for _ in range(2):
        error = in_time(send_in_vain, deadline_seconds=limit, was_cut=was_cut)
        assert re.search(r"did not end within 2 s and was killed .* group: half done", str(error))
    sender.close()
    threading.Event().wait(0.8)
    assert not (tmp_path / "alive").exists()


FROZEN = """
import sys
from bridge.delivery.sender import Sender
from bridge.testing.records import sample_record
from sinks.command import CommandConfig, CommandSink

config = CommandConfig(command=(sys.argv[1],), timeout_seconds=3.0)
sender = Sender(lambda: CommandSink(config), name="s", timeout_seconds=config.timeout_seconds)
try:
    sender.send([sample_record()])
except Exception as error:
    print(error)
sender.close()
"""


def is_waiting(pid):
    """Return whether no thread of the process is running or runnable. Linux only."""
    stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(each.rpartition(")")[2].split()[0] == "S" for each in stats)


def test_freeze_longer_than_the_timeout_does_not_run_the_program_again(script, tmp_path, agent_env):
    pid, go_on = tmp_path / "pid", tmp_path / "go-on"
    steps = f"until [ -e {go_on} ]; do sleep 0.02; done"
    program = script(f"echo $$ >{pid}.new; mv {pid}.new {pid}; {steps}; echo done >>{tmp_path}/done")
    command = [sys.executable, "-c", FROZEN, program]
    with subprocess.Popen(command, env=agent_env, stdout=subprocess.PIPE, text=True) as host:
        # During the start of the program, the frozen time counts in full. Wait until the sink waits for the program.
        waits = 0
        while not pid.exists() or waits < 5:
            time.sleep(0.02)
            waits = waits + 1 if pid.exists() and is_waiting(host.pid) else 0
        os.kill(host.pid, signal.SIGSTOP)
        os.killpg(int(pid.read_text()), signal.SIGSTOP)
        time.sleep(3.5)  # longer than the timeout
        go_on.touch()
        os.killpg(int(pid.read_text()), signal.SIGCONT)
        os.kill(host.pid, signal.SIGCONT)
        out, _ = host.communicate(timeout=30)
    assert (out, (tmp_path / "done").read_text()) == ("", "done\n")


def test_missing_program_needs_attention_and_the_record_stays_pending(tmp_path):
    missing = str(tmp_path / "missing")
    for attempt in (lambda: send(missing), CommandSink(CommandConfig(command=(missing,))).check):
        with pytest.raises(DeliveryFailed, match=r"missing(' does not exist| cannot be started)") as caught:
            attempt()
        assert caught.value.needs_attention
    with pytest.raises(DeliveryFailed, match="no-such-drain cannot be started") as caught:
        send("no-such-drain")
    assert caught.value.needs_attention


def test_program_that_cannot_be_executed_needs_attention(script, tmp_path):
    program = script("exit 0")
    Path(program).write_text("exit 0\n")
    with pytest.raises(DeliveryFailed, match=r"Exec format error\. Check the program") as caught:
        send(program)
    assert caught.value.needs_attention
    Path(program).write_text(f"#!{tmp_path}/no-shell\n")
    with pytest.raises(DeliveryFailed, match="the interpreter in its first line") as caught:
        send(program)
    Path(program).chmod(0o644)
    for attempt in (lambda: send(program), CommandSink(CommandConfig(command=(program,))).check):
        with pytest.raises(DeliveryFailed, match=r"Permission denied|is not executable") as caught:
            attempt()
        assert caught.value.needs_attention


def test_check_does_not_run_the_program(script, tmp_path):
    sink = CommandSink(CommandConfig(command=(script(f">{tmp_path}/ran"),)))
    sink.check()
    CommandSink(CommandConfig(command=("sh", "-c", f">{tmp_path}/ran"))).check()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DeliveryFailed, match=r"The directory .* does not exist"):
        CommandSink(CommandConfig(command=("sh",), directory=str(tmp_path / "gone"))).check()


def test_program_receives_the_record_and_the_configured_environment(script, tmp_path, monkeypatch):
    monkeypatch.setenv("WEBHOOK_SECRET", "hush")
    program = script(f"env >{tmp_path}/env")
    send(program, environment={"CLUSTER": "west"}, unset_environment=("WEBHOOK_SECRET",))
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert seen["CLUSTER"] == "west"
    assert seen["PATH"] == os.environ["PATH"]
    assert "WEBHOOK_SECRET" not in seen
    ours = {name: value for name, value in seen.items() if name.startswith(ENVIRONMENT_PREFIX)}
    assert ours == environment_of(sample_record())


def test_program_receives_agent_secrets_only_if_passed_explicitly(script, tmp_path, monkeypatch):
    for name in ("AZURE_CLIENT_SECRET", "AZURE_PASSWORD", "HOOK"):
        monkeypatch.setenv(name, "hush")
    program = script(f"env >{tmp_path}/env")
    table = {"type": "command", "command": [program], "pass_environment": ["AZURE_PASSWORD"]}
    settings = read({"sinks": [table, {"type": "webhook", "url_env": "HOOK"}]})
    settings.sinks[0].build().send([sample_record()])
    seen = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert seen & {"AZURE_CLIENT_SECRET", "AZURE_PASSWORD", "HOOK"} == {"AZURE_PASSWORD"}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", "is missing. It must be a list"),
        ('command = "drain --now"', "a list in square brackets"),
        ("command = []", "command is empty"),
        ('command = ["./drain"]', "Set an absolute path, or a name in PATH"),
        ('command = ["drain"]\nmax_batch = 2', "a command runs for one record"),
        (
            'command = ["drain"]\nenvironment = {SCHEDULED_EVENT_ID = "x"}',
            "must not contain '=' or begin with SCHEDULED_EVENT_",
        ),
        ('command = ["drain"]\ncommnad = 1', "Did you mean 'command'?"),
    ],
)
def test_invalid_configuration_is_reported(tmp_path, table, said):
    path = tmp_path / "config.toml"
    path.write_text(f'[[sinks]]\ntype = "command"\n{table}\n')
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert said in str(caught.value)
