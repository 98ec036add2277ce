"""The output of commands on a terminal: lines that fit the width, and readable colors unless NO_COLOR is set."""

import contextlib
import os
import re
import select
import time
from functools import partial

import pytest
from closing import closing_each

from bridge.testing import EventSpec, Simulator
from bridge.testing.peers import closed_port

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals")

_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Blue, yellow, and cyan are hard to read on some backgrounds.
_PALE = re.compile(r"\x1b\[[0-9;]*[39][346]m")
_MISTAKES = """
stop_grace = 5
[status]
listen = "node.example:9464"
[[sinks]]
type = "webhook"
urll = "https://hooks.example.net/a"
"""


class Terminal:
    """A terminal with the output of a command."""

    def __init__(self, agent, *arguments, columns=80, rows=24, **env):
        """Start the command with the terminal as standard output and standard error."""
        pty = pytest.importorskip("pty")
        self._here, there = pty.openpty()
        size = {"COLUMNS": str(columns), "LINES": str(rows)}
        self.text = ""
        self.process = agent.start_command(*arguments, stdout=there, stderr=there, **size, **env)
        os.close(there)

    def read_until(self, is_enough):
        """Read until *is_enough* accepts the text or the command exits. Return the text."""
        deadline = time.monotonic() + 30
        while not is_enough(self.text):
            assert time.monotonic() < deadline, self.text
            if not select.select([self._here], [], [], 1)[0]:
                continue
            try:
                chunk = os.read(self._here, 65_536)
            except OSError:  # On Linux, a closed terminal raises EIO.
                break
            if not chunk:
                break
            self.text += chunk.decode()
        return self.text

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        code = self.process.wait(30)
        os.close(self._here)
        return code


@pytest.fixture
def terminal(agent):
    """Start a command on a terminal."""
    with closing_each(partial(Terminal, agent)) as start:
        yield start


@pytest.mark.parametrize("columns", [60, 120])
def test_configuration_errors_are_wrapped_between_words(agent, terminal, columns):
    agent.config.write_text(_MISTAKES)
    lines = terminal("check-config", "-c", agent.config, columns=columns).read_until(lambda _: False).splitlines()
    assert max(map(len, lines)) <= columns
    assert len([line for line in lines if not line.startswith("  ")]) == 4
    assert "The host is an address or localhost, and" in " ".join(" ".join(lines).split())


def test_warnings_and_problems_are_readable_on_light_and_dark_backgrounds(agent, terminal):
    agent.configure("http://127.0.0.1:9", '[[sinks]]\ntype = "webhook"\nurl = "https://x.example/?token=x4711x4711"\n')
    shown = terminal("check-config", "-c", agent.config).read_until(lambda _: False)
    assert "\x1b[1mWarning: Sink webhook: url" in shown
    agent.config.write_text(agent.config.read_text() + 'secret_file = "/nowhere/secret"\n')
    shown += terminal("check-config", "-c", agent.config).read_until(lambda _: False)
    assert "\x1b[91mProblem: Sink webhook" in shown
    assert not _PALE.search(shown)
    assert "\x1b[" not in terminal("check-config", "-c", agent.config, NO_COLOR="1").read_until(lambda _: False)


@pytest.mark.parametrize(("columns", "no_color"), [(80, None), (80, ""), (120, "1")])
def test_status_respects_no_color_and_the_terminal_width(agent, terminal, columns, no_color):
    with Simulator(vms=["vm_0", "vm_1", "vm_2"], rate_limit=False) as azure, closed_port() as dead:
        agent.configure(azure.endpoint, f'[[sinks]]\ntype = "webhook"\nurl = "http://{dead.authority}"\n')
        azure.world.add_event(EventSpec(event_type="Terminate", resources=("vm_0", "vm_1"), duration_seconds=5))
        agent.start()
        agent.wait_for(lambda: "failing" in agent.call("status", "--config", agent.config)[1])
        env = {} if no_color is None else {"NO_COLOR": no_color}
        text = terminal("status", "-c", agent.config, columns=columns, **env).read_until(lambda _: False)
    assert ("\x1b[" in text) is not bool(no_color)
    assert not _PALE.search(text)
    lines = _CODE.sub("", text).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("Terminate  Scheduled  in ") for line in lines)
