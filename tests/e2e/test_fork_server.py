"""What the tests start by forking does what `python -m bridge` does."""

from __future__ import annotations

import signal
import time

import fork_server
import pytest


def call_both(agent, monkeypatch, *arguments, **options):
    """Return what the command gives when it is forked, and when it is started in the plain way."""
    forked = fork_server.call(*arguments, env=agent.env, cwd=agent.directory, **options)
    monkeypatch.setenv("COLD_STARTS", "1")
    return forked, fork_server.call(*arguments, env=agent.env, cwd=agent.directory, **options)


@pytest.mark.parametrize(
    ("arguments", "stdin", "code"),
    [
        (["--version"], b"", 0),
        (["run", "--config", "wrong.toml"], b"", 78),
        (["status", "--state-directory", "nowhere"], b"", 1),
        (["events", "--no-such-option"], b"", 2),
        (["decide", "--key", "none", "--kid", "x", "--approver", "y", "--event-file", "-"], b"{}", 2),
    ],
)
def test_a_forked_command_gives_what_a_plain_one_gives(agent, monkeypatch, arguments, stdin, code):
    (agent.directory / "wrong.toml").write_text("sinks = 3")
    forked, plain = call_both(agent, monkeypatch, *arguments, stdin=stdin)
    assert forked == plain
    assert forked[0] == code


def test_a_forked_agent_has_the_environment_and_directory_it_was_given(agent, imds, monkeypatch):
    agent.env["STATE_DIRECTORY"] = str(agent.directory / "named")
    (agent.directory / "config.toml").write_text(f'[imds]\nendpoint = "{imds.url}"\n')
    forked, plain = call_both(agent, monkeypatch, "check-config", "--config", "config.toml")
    assert forked == plain
    assert str(agent.directory / "named") in "".join(forked[1:])


def test_the_end_of_a_forked_agent_is_that_of_its_signal(agent, imds):
    agent.configure(imds.url)
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        agent.start()
        imds.wait_for_polls(1)
        agent.process.send_signal(number)
        assert agent.process.wait(20) == code
        assert agent.process.poll() == code


def test_a_forked_process_that_is_waited_for_too_long_is_said_to_run(agent, imds):
    agent.configure(imds.url)
    agent.start()
    began_at = time.monotonic()
    with pytest.raises(fork_server.subprocess.TimeoutExpired):
        agent.process.wait(0.05)
    assert 0.05 <= time.monotonic() - began_at < 5
    assert agent.process.poll() is None
