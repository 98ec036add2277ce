"""What is printed for a person: times and sizes in words, and how to call the command again."""

import pytest

from bridge.cli.terminal import ago, countdown, in_place, size, this_command
from bridge.text import duration


def test_command_of_a_venv_is_shown_with_its_path_and_one_on_the_path_by_its_name(tmp_path, monkeypatch):
    ours, other = tmp_path / "venv" / "scheduled-events-bridge", tmp_path / "bin" / "scheduled-events-bridge"
    for program in (ours, other):
        program.parent.mkdir()
        program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    called = "venv/scheduled-events-bridge"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert this_command(called, ["python", called, "demo"]) == called
    assert this_command("scheduled-events-bridge", ["python"]) == "scheduled-events-bridge"
    monkeypatch.setenv("PATH", str(other.parent))
    assert this_command(called, ["python", called, "demo"]) == called
    monkeypatch.setenv("PATH", str(ours.parent))
    assert this_command(str(ours), ["python", str(ours), "demo"]) == "scheduled-events-bridge"
    assert this_command("/a b/scheduled-events-bridge", ["python"]) == "'/a b/scheduled-events-bridge'"
    assert this_command("/lib/bridge/__main__.py", ["python3.12", "-m", "bridge"]) == "python3.12 -m bridge"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (750, "in 12 min 30 s"),
        (60, "in 1 min"),
        (3_600, "in 1 h"),
        (3_660, "in 1 h 1 min"),
        (90_000, "in 1 d 1 h"),
        (0.4, "now"),
        (-0.9, "now"),
        (-12, "12 s ago"),
        (-250, "4 min ago"),
        (-3_700, "1 h 1 min ago"),
    ],
)
def test_a_countdown_is_in_the_units_that_count(seconds, said):
    assert countdown(seconds) == said


def test_durations_and_sizes_are_in_words():
    assert (duration(0), duration(59.9), duration(86_400), ago(0.42)) == ("0 s", "59 s", "1 d", "0.4 s ago")
    assert (size(0), size(512 * 1024), size(268_435_456)) == ("0 KiB", "512 KiB", "256.0 MiB")


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["one", "two", "last"], ["one", "two", "last"]),
        (["1", "2", "3", "4", "last"], ["1", "2", "3", "4", "last"]),
        (["1", "2", "3", "4", "5", "last"], ["1", "2", "3", "... 2 more lines: this terminal is too low.", "last"]),
        (
            ["x" * 61, "\x1b[1m" + "y" * 60 + "\x1b[0m", "3", "last"],
            ["x" * 61, "\x1b[1m" + "y" * 60 + "\x1b[0m", "3", "last"],
        ),
        (["x" * 121, "2", "3", "last"], ["x" * 121, "... 2 more lines: this terminal is too low.", "last"]),
    ],
)
def test_screen_that_is_filled_again_is_never_longer_than_the_terminal(monkeypatch, lines, shown):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "6")
    top, _, rest = in_place(lines).partition("\x1b[H")
    *rows, below = rest.split("\n")
    assert (top, [row.removesuffix("\x1b[K") for row in rows], below) == ("", shown, "\x1b[J")
    full = [row for row in rows if not row.endswith("\x1b[K")]
    assert full == [line for line in shown if "y" in line]  # sixty of them: erasing would take the last one
