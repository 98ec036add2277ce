"""The help of the command line: groups of commands, examples, and completion."""

import shlex

import click
import pytest
from click.testing import CliRunner

from bridge.cli.commands import commands
from bridge.cli.help import EXAMPLES


def command_at(words):
    """Return the command that *words* begin with, and the rest of them."""
    command = commands
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_the_command_accepts_its_examples(line):
    words = shlex.split(line.partition("|")[0])
    command, rest = command_at(words)
    with click.Context(command) as context:
        values, left, _ = command.make_parser(context).parse_args(rest)
    assert left == []
    missing = [each.name for each in command.params if each.required and not values.get(each.name)]
    assert missing == []


def test_help_lists_every_command_in_a_group_and_the_configuration_path():
    said = CliRunner().invoke(commands, ["--help"]).output
    assert all(f"\n  {name} " in said for name in commands.commands)
    for place in ("$SCHEDULED_EVENTS_BRIDGE_CONFIG", "/etc/scheduled-events-bridge/config.toml", "$STATE_DIRECTORY"):
        assert place in said
    assert max(map(len, said.splitlines())) <= 80


def test_help_of_run_names_the_effect_of_its_first_request():
    said = " ".join(CliRunner().invoke(commands, ["run", "--help"], terminal_width=80).output.split())
    assert "first request turns on Scheduled Events for the VM" in said
    assert "15 minutes" in said


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("",), "check-config"),
        (("sta",), "status"),
        (("outbox", "re"), "retry"),
        (("run", "--a"), "--allow-second-agent"),
    ],
)
def test_shell_completes_commands_and_options(words, found):
    env = {"COMP_WORDS": " ".join(["scheduled-events-bridge", *words]), "COMP_CWORD": str(len(words))}
    variable = {"_SCHEDULED_EVENTS_BRIDGE_COMPLETE": "bash_complete"}
    said = CliRunner().invoke(commands, [], prog_name="scheduled-events-bridge", env={**env, **variable}).output
    assert f"plain,{found}" in said.splitlines()
