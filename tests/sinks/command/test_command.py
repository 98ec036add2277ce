"""The command sink with real programs: what each exit means for the record, and what the program gets to know."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.config.loader import load, read
from bridge.delivery.sender import Sender
from bridge.errors import ConfigurationError, DeliveryError
from bridge.sink import (
    ENVIRONMENT_PREFIX,
    DeliveryFailed,
    DeliveryRejected,
    TransitionRecord,
    encode,
    environment_of,
)
from bridge.testing.records import sample_record
from bridge.testing.watching import in_time
from sinks.command import CommandConfig, CommandSink

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")

WriteScript = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> WriteScript:
    def write(body: str) -> str:
        path = tmp_path / "on-event"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def send(program: str, *records: TransitionRecord, **config: Any) -> None:
    CommandSink(CommandConfig(command=(program,), **config)).send(records or (sample_record(),))


def test_exit_0_delivers_and_the_record_was_on_standard_input(script: WriteScript, tmp_path: Path) -> None:
    record = sample_record()
    send(script(f"cat >{tmp_path}/got"), record)
    assert (tmp_path / "got").read_bytes() == encode(record) + b"\n"


def test_exit_75_is_tried_again_and_may_have_begun(script: WriteScript) -> None:
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
def test_any_other_end_parks(script: WriteScript, body: str, said: str) -> None:
    with pytest.raises(DeliveryRejected) as caught:
        send(script(body))
    assert str(caught.value) == said


@pytest.mark.parametrize("signal_name", ["TERM", "INT", "HUP"])
def test_program_stopped_by_the_service_manager_is_run_again(script: WriteScript, signal_name: str) -> None:
    with pytest.raises(DeliveryFailed, match=f"was stopped by SIG{signal_name}"):
        send(script(f"trap - INT; kill -{signal_name} $$; sleep 10"))


def test_too_slow_is_killed_and_parked_before_the_host_would_retry_it(script: WriteScript, tmp_path: Path) -> None:
    program = script(f"trap '' TERM; echo half done >&2; (sleep 2.3; echo alive >{tmp_path}/alive) & wait; sleep 300")
    limit = 2.0  # of which a tenth lies between the kill and the host's own deadline: more than a busy machine is late
    sender = Sender(
        lambda: CommandSink(CommandConfig(command=(program,), timeout_seconds=limit)),
        name="command",
        timeout_seconds=limit,
    )

    def send_in_vain() -> DeliveryError:
        with pytest.raises(DeliveryError) as caught:
            sender.send([sample_record()])
        return caught.value

    def was_cut(error: DeliveryError) -> bool:
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


def is_waiting(pid: int) -> bool:
    """Return whether no thread of the process runs or would run if it got a processor; Linux alone tells."""
    stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(each.rpartition(")")[2].split()[0] == "S" for each in stats)


def test_freeze_longer_than_the_rest_of_the_timeout_runs_no_program_again(
    script: WriteScript, tmp_path: Path, agent_env: dict[str, str]
) -> None:
    pid, go_on = tmp_path / "pid", tmp_path / "go-on"
    steps = f"until [ -e {go_on} ]; do sleep 0.02; done"
    program = script(f"echo $$ >{pid}.new; mv {pid}.new {pid}; {steps}; echo done >>{tmp_path}/done")
    command = [sys.executable, "-c", FROZEN, program]
    with subprocess.Popen(command, env=agent_env, stdout=subprocess.PIPE, text=True) as host:
        # A start that is not over yet is no wait: its whole time counts, frozen or not.
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


def test_missing_program_needs_a_person_and_the_record_waits(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for attempt in (lambda: send(missing), CommandSink(CommandConfig(command=(missing,))).check):
        with pytest.raises(DeliveryFailed, match=r"missing(' does not exist| cannot be started)") as caught:
            attempt()
        assert caught.value.needs_attention
    with pytest.raises(DeliveryFailed, match="no-such-drain cannot be started") as caught:
        send("no-such-drain")
    assert caught.value.needs_attention


def test_program_that_cannot_be_executed_needs_a_person(script: WriteScript, tmp_path: Path) -> None:
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


def test_check_runs_nothing(script: WriteScript, tmp_path: Path) -> None:
    sink = CommandSink(CommandConfig(command=(script(f">{tmp_path}/ran"),)))
    sink.check()
    CommandSink(CommandConfig(command=("sh", "-c", f">{tmp_path}/ran"))).check()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DeliveryFailed, match=r"The directory .* does not exist"):
        CommandSink(CommandConfig(command=("sh",), directory=str(tmp_path / "gone"))).check()


def test_program_sees_the_record_and_the_environment_it_was_given(
    script: WriteScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", "hush")
    program = script(f"env >{tmp_path}/env")
    send(program, environment={"CLUSTER": "west"}, unset_environment=("WEBHOOK_SECRET",))
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert seen["CLUSTER"] == "west"
    assert seen["PATH"] == os.environ["PATH"]
    assert "WEBHOOK_SECRET" not in seen
    ours = {name: value for name, value in seen.items() if name.startswith(ENVIRONMENT_PREFIX)}
    assert ours == environment_of(sample_record())


def test_program_sees_the_secrets_of_the_agents_credentials_only_if_the_configuration_passes_them(
    script: WriteScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_wrong_configuration_is_said(tmp_path: Path, table: str, said: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[[sinks]]\ntype = "command"\n{table}\n')
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert said in str(caught.value)
