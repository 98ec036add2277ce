"""What the tests start by forking does what `python -m bridge` does."""

from __future__ import annotations

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
