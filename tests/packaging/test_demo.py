"""`demo`, as somebody runs it who has just installed the wheel."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

_PLACES = ("cwd", "home", "tmp")
_ROOTS_STATE = Path("/var/lib/scheduled-events-bridge")
_PROMISED_SECONDS = 20
_SLOW_MACHINE_SECONDS = 10


@pytest.fixture(scope="module")
def demo(installed, tmp_path_factory):
    """Run the demo once, piped, and return (the finished process, its process group, where it could have written)."""
    base = tmp_path_factory.mktemp("demo")
    for place in _PLACES:
        (base / place).mkdir()
    hidden = ("PYTHON", "XDG_", "SCHEDULED_EVENTS_BRIDGE_", "STATE_DIRECTORY", "FORCE_COLOR")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    env |= {"HOME": str(base / "home"), "TMPDIR": str(base / "tmp")}
    process = subprocess.Popen(
        [installed.command, "demo"],
        cwd=base / "cwd",
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    had_roots_state = _ROOTS_STATE.exists()
    with process:
        try:
            stdout, stderr = process.communicate(timeout=_PROMISED_SECONDS + _SLOW_MACHINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"demo did not end by itself. It printed:\n{stdout}\n{stderr}")
    assert had_roots_state == _ROOTS_STATE.exists(), f"demo made or removed {_ROOTS_STATE}"
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr), process.pid, base


def test_demo_ends_by_itself_and_well(demo):
    done, _, _ = demo
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_piped_demo_prints_one_record_a_line(demo):
    done, _, _ = demo
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records
    assert all(record["schema_version"] == 1 and record["event"] for record in records)


def test_demo_shows_an_event_from_announcement_to_completion(demo):
    done, _, _ = demo
    records = [json.loads(line) for line in done.stdout.splitlines()]
    first_event = records[0]["event"]["event_id"]
    transitions = [r["transition"] for r in records if r["event"]["event_id"] == first_event]
    assert [name for name in transitions if name != "updated"] == ["scheduled", "started", "completed"]


def test_piped_demo_prints_no_terminal_codes(demo):
    done, _, _ = demo
    assert "\x1b" not in done.stdout


def test_demo_leaves_no_file_behind(demo):
    _, _, base = demo
    assert [path for place in _PLACES for path in (base / place).rglob("*")] == []


def test_demo_leaves_no_process_behind(demo):
    _, group, _ = demo
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
