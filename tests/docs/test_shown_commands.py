"""Checks that every command on a page exists with its options, in blocks and in sentences.

test_every_block.py checks that each block has a test or a list of requirements.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import doc_pages
import msgspec
import pytest
from shown_commands import NEEDED, PROGRAM, called, check
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


def _commands_in_a_block(name):
    for block in doc_pages.blocks(doc_pages.page(name), "sh") if name in PAGES_WITH_BLOCKS else ():
        for words in called(block.text):
            is_ours = PROGRAM in (os.path.basename(word) for word in words)  # noqa: PTH119  # The word might not be a path.
            if is_ours or block.mark in NEEDED:
                yield words


def _words(span):
    try:
        return shlex.split(span.removeprefix("sudo "))
    except ValueError:  # The text contains a quotation mark that is not shell syntax.
        return span.split()


def _commands_in_a_sentence(name):
    for span in sorted(set(doc_pages.spans(doc_pages.page(name)))):
        words = _words(re.sub(r"\{\{.*?\}\}", "VALUE", span).partition(" | ")[0])
        if len(words) > 1 and words[0] in commands.commands.commands:
            words = [PROGRAM, *words]
        if len(words) > 1 and words[0] in {PROGRAM, "az", "systemctl", "journalctl"}:
            yield words


@pytest.mark.parametrize("page", WRITTEN_IN)
def test_every_command_on_a_page_exists_with_its_options(page):
    for words in (*_commands_in_a_block(page), *_commands_in_a_sentence(page)):
        is_packed = any(word.startswith(".ci/") for word in words) and not (doc_pages.ROOT / ".ci").exists()
        if not is_packed:  # an unpacked sdist has no .ci
            check(words)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_documented_commands_sign_a_decision(tmp_path, agent_env):
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
