"""The example of the page for sink authors works by class or by name, and passes the contract suite."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.testing.http_contract import HttpPeer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "write-a-sink.md"
_MARKED = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOKEN = "pager-token-4711"


def _files():
    """Return the fenced blocks with a file mark by the name of the file."""
    return dict(_MARKED.findall(PAGE.read_text(encoding="utf-8")))


@pytest.fixture
def folder(tmp_path):
    """A folder with the example and its installed distribution metadata."""
    for name, text in _files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    project = tomllib.loads(_files()["pyproject.toml"])["project"]
    info = tmp_path / "acme_pager-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    points = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    return tmp_path


@pytest.fixture
def run(folder, agent_env):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env={**agent_env, "PYTHONPATH": str(folder), "PAGER_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def peer():
    with HttpPeer() as peer:
        yield peer


@pytest.mark.parametrize("config", ["by-class.toml", "by-name.toml"])
def test_example_sink_sends_by_class_or_entry_point_name(run, folder, peer, config):
    path = folder / config
    path.write_text(path.read_text().replace("https://pager.example.net", f"http://{peer.address.authority}"))
    done = run("bridge", "send-test", "-c", config)
    assert done.returncode == 0, done.stderr
    [request] = peer.requests
    record = json.loads(request.body)
    assert (request.path, record["transition"]) == ("/pages", "test")
    assert (request.headers["idempotency-key"], request.headers["authorization"]) == (record["id"], f"Bearer {TOKEN}")


def test_unknown_key_of_the_example_sink_is_reported(run, folder):
    (folder / "wrong.toml").write_text('[[sinks]]\ntype = "acme-pager"\nurl = "pager"\ntokn_env = "X"\n')
    done = run("bridge", "check-config", "-c", "wrong.toml")
    assert done.returncode == 78
    assert "token_env" in done.stderr


def test_example_passes_the_contract_suite(run):
    done = run("pytest", "-q", "-p", "no:cacheprovider", "test_acme_pager.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b18 passed, 1 skipped", done.stdout), done.stdout
