"""Every command that a page shows exists, with its options: in a block or in a sentence, of ours or of others.

That each block is run, or says what it needs, is in test_every_block.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import click
import doc_pages
import msgspec
import pytest
from shown_commands import NEEDED, OTHERS, PROGRAM, called, check, check_ours
from vectors.make import unb64

from bridge.cli import commands
from bridge.sink import encode
from bridge.testing.records import VM, sample_event, sample_record

#: An unpacked sdist has no .github.
PAGES_WITH_BLOCKS = [
    *doc_pages.pages(),
    *(name for name in [".github/CONTRIBUTING.md"] if (doc_pages.ROOT / name).exists()),
]
WRITTEN_IN = [*PAGES_WITH_BLOCKS, "deploy/prometheus/rules.yml"]


def _commands_in_a_block():
    for name in PAGES_WITH_BLOCKS:
        for block in doc_pages.blocks(doc_pages.page(name), "sh"):
            for words in called(block.text):
                is_ours = PROGRAM in (os.path.basename(word) for word in words)  # noqa: PTH119  # a word, no path
                if is_ours or block.mark in NEEDED:
                    yield pytest.param(words, id=f"{name}: {' '.join(words)}")


def _words(span):
    try:
        return shlex.split(span.removeprefix("sudo "))
    except ValueError:  # a quotation mark that is no shell's
        return span.split()


def _commands_in_a_sentence():
    for name in WRITTEN_IN:
        for span in sorted(set(doc_pages.spans(doc_pages.page(name)))):
            words = _words(re.sub(r"\{\{.*?\}\}", "VALUE", span).partition(" | ")[0])
            if len(words) > 1 and words[0] in commands.commands.commands:
                words = [PROGRAM, *words]
            if len(words) > 1 and words[0] in {PROGRAM, "az", "systemctl", "journalctl"}:
                yield pytest.param(words, id=f"{name}: {span}")


@pytest.mark.parametrize("words", list(_commands_in_a_block()))
def test_every_command_in_a_block_exists_with_its_options(words):
    if any(word.startswith(".ci/") for word in words) and not (doc_pages.ROOT / ".ci").exists():
        pytest.skip("an unpacked sdist has no .ci")
    check(words)


@pytest.mark.parametrize("words", list(_commands_in_a_sentence()))
def test_every_command_in_a_sentence_exists_with_its_options(words):
    check(words)


@pytest.mark.parametrize(
    "words", [["stauts"], ["status", "--jsno"], ["outbox", "list", "--state", "prked"], ["schema", "x"]]
)
def test_a_command_that_does_not_exist_is_found(words):
    with pytest.raises(click.UsageError):
        check_ours(words)


@pytest.mark.parametrize(
    "script",
    [
        "az vm restrat --name VM",
        "az vm restart --no-waiting",
        "aws ec2 reboot-instances",
        'x() { kubectl -n a "$@"; }\nx frobnicate',
        'echo "$(az vm restart --no-waiting)"',
        "runuser -u a -- scheduled-events-bridge stauts",
        "sudo ./install.sh --purgee",
        "python3 .ci/release.py check --tug v1.2.3",
        "bash .ci/run relaese",
        "curl -s http://127.0.0.1:9464/reedyz",
    ],
)
def test_a_slip_in_a_command_that_no_test_runs_is_found(script):
    *_, words = called(script)
    with pytest.raises(click.UsageError):
        check(words)


def test_what_is_recorded_is_shown_and_says_why_it_is_not_run():
    shown = [each.values[0] for each in (*_commands_in_a_block(), *_commands_in_a_sentence())]
    words = {os.path.basename(word) for command in shown for word in command}  # noqa: PTH119  # a word, no path
    assert set(OTHERS) <= words
    assert all(each["why"] for each in OTHERS.values())


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
    claims = json.loads(unb64(payload))
    assert (claims["sub"], claims["aud"], claims["decision"]) == (event_id, VM.vm_id, "approve")
