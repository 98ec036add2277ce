"""Every command that a page shows: it is run by a test, or it says what it needs, and then its words exist at least."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import click
import doc_pages
import msgspec
import pytest

from bridge.cli import commands
from bridge.sink import encode
from bridge.testing.records import VM, sample_event, sample_record

PROGRAM = "scheduled-events-bridge"
#: The marks of blocks that a test runs, with its file. The drain script is run by test_configurations.
RUN = {
    "demo-command": "test_readme.py",
    "test-command": "the readme step of .ci/run",
    "try: enter": "test_try.py",
    "try: run": "test_try.py",
    "try: look": "test_try.py",
    "approval: enter": "test_try.py",
    "approval: run": "test_first_approval.py",
    "approval: announce": "test_first_approval.py",
    "approval: approve": "test_first_approval.py",
    "keys: make and use": "this one",
    "example: check": "test_protocol.py",
    "artifact: build": "the artifacts of .ci/run",
    "release: rehearse": "the release step of .ci/run",
    "kql: transformation": "test_operators.py",
}
#: What a block needs that no test has.
NEEDED = {
    "needs: an Azure VM",
    "needs: an Azure subscription",
    "needs: root on the VM",
    "needs: systemd",
    "needs: a cluster",
    "needs: a release",
    "needs: the extra portal",
    "needs: the right to push a tag",
    "needs: minutes and a package index; the README's line",
}
#: Pages all of whose blocks need one thing.
NEEDED_BY_PAGE = {
    ".github/CONTRIBUTING.md": "the checkout, and minutes",
    "deploy/azure/README.md": "an Azure subscription",
    "deploy/kubernetes/README.md": "a cluster",
    "deploy/helm/README.md": "a cluster",
}
#: Pages whose blocks are run by the test that is named.
ELSEWHERE = {
    "docs/reference/sinks.md": "test_configurations.py",
}
#: An unpacked sdist has no .github.
PAGES_WITH_BLOCKS = [
    *doc_pages.pages(),
    *(name for name in [".github/CONTRIBUTING.md"] if (doc_pages.ROOT / name).exists()),
]
WRITTEN_IN = [*PAGES_WITH_BLOCKS, "deploy/prometheus/rules.yml"]


def _shell_blocks():
    return [(name, block) for name in PAGES_WITH_BLOCKS for block in doc_pages.blocks(doc_pages.page(name), "sh")]


def _simple_commands(script):
    """Return the words of each simple command in *script*; a comment, a pipe or an operator ends one."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        words.whitespace_split = True
        words.commenters = "#"
        command = []
        for word in words:
            if set(word) <= set("|&;()"):
                found.append(command)
                command = []
            elif set(word) <= set("<>"):
                command.append(None)  # the next word is a file
            elif command and command[-1] is None:
                command.pop()
            else:
                command.append(word)
        found.append(command)
    return [command for command in found if command]


def _check(words):
    """Raise click.UsageError when the program does not know these *words*, or not together."""
    command, context = commands.commands, click.Context(commands.commands, info_name=PROGRAM)
    while isinstance(command, click.Group):
        options = [word for word in words if word.startswith("-")]
        if not words or words[0] in options:
            command.make_parser(context).parse_args(list(words))
            return
        name, *words = words
        inner = command.get_command(context, name)
        if inner is None:
            raise click.UsageError(f"There is no command {name}")
        command, context = inner, click.Context(inner, info_name=name, parent=context)
    values, left, _ = command.make_parser(context).parse_args(list(words))
    if left:
        raise click.UsageError(f"Too many words: {left}")
    for parameter in command.params:
        given = values.get(parameter.name)
        if isinstance(parameter.type, click.Choice) and isinstance(given, str):
            parameter.type.convert(given, parameter, context)


def _commands_in_a_block():
    for name, block in _shell_blocks():
        for words in _simple_commands(block.text):
            program = Path(words[0]).name
            if program == PROGRAM:
                yield pytest.param(words[1:], id=f"{name}: {' '.join(words[1:])}")
            elif f"-- {PROGRAM} " in " ".join(words):  # kubectl exec, runuser
                yield pytest.param(words[words.index("--") + 2 :], id=f"{name}: {' '.join(words)}")


def _commands_in_a_sentence():
    for name in WRITTEN_IN:
        for span in sorted(set(doc_pages.spans(doc_pages.page(name)))):
            words = re.sub(r"\{\{.*?\}\}", "VALUE", span).split()
            if words and words[0] == PROGRAM and words[1:]:
                yield pytest.param(words[1:], id=f"{name}: {span}")
            elif words and len(words) > 1 and words[0] in commands.commands.commands:
                yield pytest.param(words, id=f"{name}: {span}")


@pytest.mark.parametrize(("name", "block"), _shell_blocks(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_block_of_commands_is_run_or_says_what_it_needs(name, block):
    if name in NEEDED_BY_PAGE or name in ELSEWHERE:
        assert block.mark not in RUN
    else:
        assert block.mark in RUN or block.mark in NEEDED, block.text


def test_every_shell_block_says_sh():
    languages = {block.language for name in PAGES_WITH_BLOCKS for block in doc_pages.blocks(doc_pages.page(name))}
    assert not languages & {"", "bash", "shell", "console"}


def test_every_page_that_is_named_here_exists_and_shows_commands():
    named = {*NEEDED_BY_PAGE, *ELSEWHERE}
    if ".github/CONTRIBUTING.md" not in PAGES_WITH_BLOCKS:
        named.discard(".github/CONTRIBUTING.md")
    assert named <= {name for name, _ in _shell_blocks()}


def test_every_mark_of_a_block_that_is_run_is_there():
    assert set(RUN) == {block.mark for _, block in _shell_blocks() if block.mark in RUN}


@pytest.mark.parametrize("words", list(_commands_in_a_block()))
def test_every_command_in_a_block_exists_with_its_options(words):
    _check(words)


@pytest.mark.parametrize("words", list(_commands_in_a_sentence()))
def test_every_command_in_a_sentence_exists_with_its_options(words):
    _check(words)


@pytest.mark.parametrize(
    "words", [["stauts"], ["status", "--jsno"], ["outbox", "list", "--state", "prked"], ["schema", "x"]]
)
def test_a_command_that_does_not_exist_is_found(words):
    with pytest.raises(click.UsageError):
        _check(words)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_decision_is_signed_as_the_page_shows(tmp_path, agent_env):
    script = doc_pages.marked(doc_pages.page("docs/concepts/approvals.md"), "keys: make and use")
    event_id = re.search(r"--event-id (\S+)", script)[1]
    here = [line for line in script.splitlines(keepends=True) if not line.rstrip().endswith("# on the VM")]
    record = sample_record(event=msgspec.structs.replace(sample_event(), event_id=event_id))
    (tmp_path / "records.jsonl").write_bytes(encode(record) + b"\n")
    (tmp_path / PROGRAM).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bridge "$@"\n')
    (tmp_path / PROGRAM).chmod(0o755)
    done = subprocess.run(
        ["sh", "-e", "-c", "".join(here)],
        cwd=tmp_path,
        env={**agent_env, "PATH": f"{tmp_path}{os.pathsep}{agent_env['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    header, payload, signature = done.stdout.splitlines()[-1].split(".")
    assert all((header, signature))
    claims = json.loads(runpy.run_path(str(doc_pages.ROOT / "tests/unit/vectors/make.py"))["unb64"](payload))
    assert (claims["sub"], claims["aud"], claims["decision"]) == (event_id, VM.vm_id, "approve")
