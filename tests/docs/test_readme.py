"""The two commands of the README, and the links inside the repository."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import doc_pages
import pytest

ROOT = Path(__file__).parents[2]

_FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_REFERENCE_LINK = re.compile(r"^\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def _git_files():
    """Return the tracked files. Skip the test in an unpacked sdist, which has no git repository."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"git cannot list the checkout: {done.stderr.strip()}")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _command(marker):
    """Return the lines of the fenced block that follows *marker* in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^<!-- {marker} -->\n+```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no fenced block after <!-- {marker} -->"
    return found.group(1).splitlines()


def _anchors(text):
    """Return the anchors that GitHub gives the headings of *text*."""
    anchors = set()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        repeat = 0
        while (candidate := f"{anchor}-{repeat}" if repeat else anchor) in anchors:
            repeat += 1
        anchors.add(candidate)
    return anchors


def _dead_links(name):
    """Yield the link targets of the Markdown file *name* that do not exist in the repository."""
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    prose = _CODE.sub("", _FENCED.sub("", text))
    for target in _INLINE_LINK.findall(prose) + _REFERENCE_LINK.findall(prose):
        if _ELSEWHERE.match(target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in _anchors(there.read_text(encoding="utf-8"))):
            yield target


@pytest.mark.parametrize("marker", ["demo-command", "test-command"])
def test_readme_command_is_one_line_that_creates_a_venv(marker):
    lines = _command(marker)
    assert len(lines) == 1, lines
    assert lines[0].startswith("python3 -m venv .venv && .venv/bin/pip install --quiet ")


def test_links_inside_the_repository_are_valid():
    names = {*doc_pages.pages(), *(name for name in _git_files() if name.endswith(".md"))}
    dead = {name: list(_dead_links(name)) for name in sorted(names)}
    assert {name: targets for name, targets in dead.items() if targets} == {}


@pytest.mark.packaging
@pytest.mark.timeout(900)
def test_readme_demo_command_works_in_a_fresh_copy(agent_env, tmp_path):
    for name in _git_files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    done = subprocess.run(
        ["bash", "-c", _command("demo-command")[0]],
        cwd=tmp_path,
        env=agent_env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,  # The README promises records within two minutes.
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert "completed" in [record["transition"] for record in records]
