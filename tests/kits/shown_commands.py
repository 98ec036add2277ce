"""Parses the commands of a shell block, and checks the words of commands that no test can run.

Commands of this project are checked against their programs. Other commands are checked against
`commands_of_others.toml`, because tests have no Azure subscription, no cluster, and no root.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bridge.cli.commands import commands

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

ROOT = Path(__file__).parents[2]
PROGRAM = "scheduled-events-bridge"
#: Program -> the reason for the check by words, and its commands with all options.
OTHERS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "commands_of_others.toml").read_text(encoding="utf-8")
)
#: Marks of blocks that no test can run. The tests check their words.
NEEDED = {
    "needs: an Azure VM",
    "needs: an Azure subscription",
    "needs: root on the VM",
    "needs: systemd",
    "needs: a cluster",
    "needs: a damaged outbox",
    "needs: a release",
    "needs: a portal",
    "needs: the extra portal",
    "needs: the right to push a tag",
    "needs: minutes and a package index; the README's line",
    "needs: minutes; .ci/run does the same",
    "artifact: build",  # takes minutes and a package index; .ci/run builds the archives with the same programs
    "release: rehearse",  # minutes; it is a step of .ci/run itself
}
#: Words of the shell before a program, or without a program.
NO_PROGRAM = frozenset({"{", "}", "sudo", "export", "cd", "for", "do", "done"})
_HEALTH = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "bridge" / "health").glob("*.py")))
_INSTALLER = (ROOT / "deploy" / "systemd" / "install.sh").read_text(encoding="utf-8")
_FUNCTION = re.compile(r"^(?P<name>\w+)\(\) \{(?: (?P<body>.+) \"\$@\"; \})?", re.MULTILINE)


def simple_commands(script: str) -> list[list[str]]:
    """Return the words of each simple command in *script*. A comment, a pipe, or an operator ends a command."""
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        words.whitespace_split = True
        words.commenters = "#"
        command: list[str] = []
        is_file = False
        for word in words:
            if set(word) <= set("|&;()"):
                found.append(command)
                command = []
            elif set(word) <= set("<>"):
                is_file = True  # the next word
            elif is_file:
                is_file = False
            else:
                command.append(word)
        found.append(command)
    quoted = [inner for command in found for word in command for inner in re.findall(r"\$\((.+)\)", word)]
    return [command for command in found if command] + [each for inner in quoted for each in simple_commands(inner)]


def called(script: str) -> Iterator[list[str]]:
    """Yield the programs that *script* runs, without sudo, assignments, and functions of the script."""
    bodies = {each["name"]: each["body"] for each in _FUNCTION.finditer(script)}
    for command in simple_commands(script):
        words = list(command)
        while words and (words[0] in NO_PROGRAM or re.match(r"\w+=", words[0])):
            words = [] if words[0] in {"cd", "for"} else words[1:]
        if words and words[0] in bodies:
            body = bodies[words[0]]
            words = [*shlex.split(body), *words[1:]] if body and words[1:] else []
        if words and words[-1] != "$@":  # the calls in the function body are checked
            yield words


def check_ours(words: list[str]) -> None:
    """Raise click.UsageError if the program rejects these *words* or their combination."""
    command: click.Command | None = commands
    context = click.Context(commands, info_name=PROGRAM)
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            command.make_parser(context).parse_args(list(words))
            return
        name, *words = words
        inner = command.get_command(context, name)
        if inner is None:
            raise click.UsageError(f"There is no command {name}")
        command, context = inner, click.Context(inner, info_name=name, parent=context)
    assert command is not None
    values, left, _ = command.make_parser(context).parse_args(list(words))
    if left:
        raise click.UsageError(f"Too many words: {left}")
    for parameter in command.params:
        given = values.get(parameter.name or "")
        if isinstance(parameter.type, click.Choice) and isinstance(given, str):
            parameter.type.convert(given, parameter, context)


def check(words: list[str]) -> None:
    """Raise click.UsageError if the program of *words* does not exist or does not accept them."""
    program = Path(words[0]).name
    if "--" in words:  # kubectl exec, runuser: another command follows
        at = words.index("--")
        check(words[at + 1 :])
        words = words[:at]
    if program in {"python", "python3"} and words[1:2] == ["-m"]:
        check(words[2:])
    elif program == PROGRAM:
        check_ours(words[1:])
    elif program == "install.sh":
        _check_installer(words[1:])
    elif words[0] == "bash":
        _check_steps(words[1:])
    elif words[0] in {"python3", "build/bin/python"} and words[1].endswith(".py"):
        _check_script(words[1:])
    elif program == "sas.sh":
        _check_script(words, quote="")
    else:
        _check_other(program, words[1:])


def _check_installer(words: list[str]) -> None:
    for option in _options(words):
        if not re.search(rf"^ +[^#\n]*{option}\b[^#\n]*\)", _INSTALLER, re.MULTILINE):
            raise click.UsageError(f"install.sh has no option {option}")


def _check_steps(words: list[str]) -> None:
    script, *steps = words
    text = _text_of(script)
    for step in steps:
        if f"\nstep_{step}()" not in text:
            raise click.UsageError(f"{script} has no step {step}")


def _check_script(words: list[str], quote: str = '"') -> None:
    script, *rest = words
    text = _text_of(script)
    for option in _options(rest):
        if f"{quote}{option}{quote}" not in text:
            raise click.UsageError(f"{script} has no option {option}")


def _text_of(script: str) -> str:
    if not (ROOT / script).is_file():
        raise click.UsageError(f"There is no {script}")
    return (ROOT / script).read_text(encoding="utf-8")


def _check_other(program: str, words: list[str]) -> None:
    if program not in OTHERS:
        raise click.UsageError(
            f"{program} is unknown. Add it to commands_of_others.toml, with the reason why no test runs it"
        )
    known = OTHERS[program]["commands"]
    while words and words[0] in OTHERS[program].get("first", []):
        words = words[2:]
    verbs = [" ".join(words[:length]) for length in range(len(words), -1, -1)]
    verb = next((each for each in verbs if each in known), None)
    if verb is None:
        raise click.UsageError(f"No command of {program}: {' '.join(words)}")
    wrong = [each for each in _options(words) if each not in known[verb]]
    if wrong:
        raise click.UsageError(f"{program} {verb} does not take {', '.join(wrong)}")
    for path in re.findall(r"http://127\.0\.0\.1:9464(/\w*)", " ".join(words)):
        if f'"{path}"' not in _HEALTH:
            raise click.UsageError(f"The agent has no {path}")


def _options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]
