"""`demo` as a process: with pipes, on several terminals, interrupted, and with a broken pipe."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jsonschema
import pytest

from bridge.events.record import json_schema

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals and no SIGINT for one process")

_DEMO = [sys.executable, "-m", "bridge", "demo"]
_PLACES = ("cwd", "home", "tmp")
_HIDDEN = ("PYTHON", "XDG_", "LC_", "LANG", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "STATE_DIR")
_PROMISED_SECONDS = 20
_SLOW_MACHINE_SECONDS = 25
_PROMPT_SECONDS = 8
_COLOUR = re.compile(rb"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")
_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


class Run:
    """A running demo in temporary directories, with a configuration that it must not read."""

    def __init__(self, base, *, terminal=None, reads_all=True, **env):
        """Start the demo on pipes or on a *terminal* (columns, rows). Without *reads_all*, read only one chunk."""
        self.base, self._reads_all = base, reads_all
        for place in _PLACES:
            (base / place).mkdir(parents=True)
        (base / "config.toml").write_text("this is no TOML", encoding="utf-8")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
        environ |= {
            "HOME": str(base / "home"),
            "TMPDIR": str(base / "tmp"),
            "TERM": "xterm-256color",
            "SCHEDULED_EVENTS_BRIDGE_CONFIG": str(base / "config.toml"),
            "STATE_DIRECTORY": str(base / "state"),
        }
        self.started = time.monotonic()
        self._output, its_output = os.pipe() if terminal is None else _open_terminal(*terminal)
        self.process = subprocess.Popen(
            _DEMO,
            cwd=base / "cwd",
            env=environ | env,
            stdin=subprocess.DEVNULL,
            stdout=its_output,
            stderr=subprocess.PIPE if terminal is None else its_output,
            start_new_session=True,
        )
        os.close(its_output)
        self.seen = self.stderr = b""
        self._news = threading.Condition()
        # A terminal without a reader is full after a few frames, and the demo would wait.
        self._reader = threading.Thread(target=self._read_all, daemon=True)
        self._reader.start()

    def wait_for(self, text):
        """Wait until the demo has printed *text*."""
        with self._news:
            assert self._news.wait_for(lambda: text in self.seen, _SLOW_MACHINE_SECONDS), self.seen

    def finish(self):
        """Wait until the demo exits, and return the exit code."""
        with self.process as process:
            try:
                code = process.wait(_PROMISED_SECONDS + _SLOW_MACHINE_SECONDS)
            finally:
                process.kill()
            self._reader.join(_PROMPT_SECONDS)
            self.stderr = process.stderr.read() if process.stderr else b""
        return code

    def _read_all(self):
        with contextlib.suppress(OSError):  # On Linux, a closed terminal raises EIO.
            while chunk := os.read(self._output, 65536):
                with self._news:
                    self.seen += chunk
                    self._news.notify_all()
                if not self._reads_all:
                    break
        self.seconds = time.monotonic() - self.started
        os.close(self._output)

    @property
    def text(self):
        """Return the output without terminal codes."""
        return _CODE.sub("", self.seen.decode())

    @property
    def left_behind(self):
        """Return the files that the demo created."""
        files = [path for place in _PLACES for path in (self.base / place).rglob("*")]
        return files + [path for path in self.base.iterdir() if path.name not in {*_PLACES, "config.toml"}]


def _open_terminal(columns, rows):
    import fcntl  # noqa: PLC0415  # not on Windows
    import pty  # noqa: PLC0415
    import struct  # noqa: PLC0415
    import termios  # noqa: PLC0415

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return master, slave


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Return finished demos by name. All demos run at the same time."""
    base = tmp_path_factory.mktemp("demos")
    runs = {
        "piped": Run(base / "piped"),
        "terminal": Run(base / "terminal", terminal=(80, 24), LANG="C.UTF-8"),
        "plain": Run(base / "plain", terminal=(40, 20), LC_ALL="C", NO_COLOR="1"),
        "dumb": Run(base / "dumb", terminal=(200, 60), LANG="C.UTF-8", TERM="dumb"),
    }
    return {name: (run, run.finish()) for name, run in runs.items()}


@pytest.mark.parametrize("name", ["piped", "terminal", "plain", "dumb"])
def test_demo_exits_0_in_time_and_leaves_no_files(demos, name):
    run, code = demos[name]
    assert (code, run.stderr) == (0, b""), run.text
    assert run.seconds < _PROMISED_SECONDS + _SLOW_MACHINE_SECONDS
    assert run.left_behind == []


def test_piped_demo_prints_valid_records_of_one_complete_event(demos):
    validator = jsonschema.Draft202012Validator(json_schema())
    records = [json.loads(line) for line in demos["piped"][0].seen.splitlines()]
    assert [problem.message for record in records for problem in validator.iter_errors(record)] == []
    assert [(r["sequence"], r["transition"], r["evidence"]) for r in records] == [
        (1, "scheduled", "observed"),
        (2, "started", "observed"),
        (3, "completed", "observed"),
    ]
    assert len({r["event"]["event_id"] for r in records}) == 1


@pytest.mark.parametrize("name", ["terminal", "plain", "dumb"])
def test_demo_explains_each_transition_and_shows_the_next_command(demos, name):
    text = " ".join(demos[name][0].text.split())
    for words in ("Azure announced a Freeze of 5 s", "s of notice", "The Freeze began", "it is over", "On call:"):
        assert words in text
    assert "3 records, none lost." in text
    assert text.index("s scheduled") < text.index("s started") < text.index("s completed")
    assert "run --config FILE" in text


def test_demo_uses_only_supported_terminal_codes_and_restores_the_cursor(demos):
    seen = {name: run.seen for name, (run, _) in demos.items()}
    assert _COLOUR.search(seen["terminal"])
    assert not re.search(
        rb"\x1b\[[0-9;]*[39][346][;m]", seen["terminal"]
    )  # Blue, yellow, and cyan are hard to read on some backgrounds.
    assert seen["terminal"].rindex(_SHOW_CURSOR) > seen["terminal"].index(_HIDE_CURSOR)
    assert seen["plain"].isascii()
    assert not _COLOUR.search(seen["plain"])
    assert b"\x1b" not in seen["dumb"]


@pytest.mark.parametrize(("terminal", "number"), [(None, signal.SIGTERM), ((80, 24), signal.SIGINT)])
def test_interrupted_demo_exits_promptly_and_leaves_no_files(tmp_path, terminal, number):
    run = Run(tmp_path / "run", terminal=terminal)
    run.wait_for(b"scheduled")
    at = time.monotonic()
    run.process.send_signal(number)
    assert run.finish() == 130
    assert time.monotonic() - at < _PROMPT_SECONDS
    assert b"Traceback" not in run.seen + run.stderr
    assert run.left_behind == []


def test_demo_exits_0_without_an_error_on_a_broken_pipe(tmp_path):
    run = Run(tmp_path / "run", reads_all=False)
    run.wait_for(b"\n")
    at = time.monotonic()
    assert run.finish() == 0
    assert time.monotonic() - at < _PROMPT_SECONDS
    assert (run.stderr, run.left_behind) == (b"", [])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a memory file system")
def test_demo_does_not_warn_that_its_temporary_directory_is_in_memory(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        run = Run(tmp_path / "run", TMPDIR=memory)
        assert (run.finish(), run.stderr) == (0, b"")


def test_demo_with_closed_standard_output_fails_with_the_reason(tmp_path):
    command = ["sh", "-c", 'exec "$0" "$@" >&-', *_DEMO]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=_PROMPT_SECONDS)
    assert run.returncode == 1
    assert "Standard output is closed" in run.stderr
