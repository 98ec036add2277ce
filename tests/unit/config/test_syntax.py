"""A file that is no TOML: the sentence says what a person wrote and what to write instead, and shows no value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.config.loader import load
from bridge.errors import ConfigurationError

QUOTES = "text stands in quotes: "
TWICE = "for the second time"


@pytest.fixture
def mistake(tmp_path: Path) -> Callable[[str], str]:
    def mistake(text: str) -> str:
        path = tmp_path / "config.toml"
        path.write_text(text)
        with pytest.raises(ConfigurationError) as caught:
            load(path)
        (said,) = caught.value.mistakes
        return said

    return mistake


@pytest.mark.parametrize(
    ("text", "where", "sentence"),
    [
        ("name = abc\n", "line 1, column 8", f'{QUOTES}name = "..."'),
        ("url = https://h/x\n", "line 1", f'{QUOTES}url = "..."'),
        ("[status]\nlisten = 127.0.0.1:9464\n", "line 2", f'{QUOTES}listen = "..."'),
        ("directory = /var/lib/x\n", "line 1", f'{QUOTES}directory = "..."'),
        ("timeout_seconds = 10s\n", "line 1", "a number with a unit"),
        ("max_bytes = 1,000\n", "line 1", "no comma"),
        ("dry_run = True\n", "line 1", "write `dry_run = true`"),
        ("heartbeat = yes\n", "line 1", "write `heartbeat = true`"),
        ("dry_run = off\n", "line 1", "write `dry_run = false`"),
        ("name = null\n", "line 1", "Leave name out"),
        ("name =\n", "line 1", "the value of name is missing"),
        ("name = # later\n", "line 1", "the value of name is missing"),
        ("a = = 5\n", "line 1", "one = is enough"),
        ("url = ${HOOK}\n", "line 1", "a variable is not filled in"),
        ("url = $HOOK\n", "line 1", "a variable is not filled in"),
        ("event_types = [Freeze, Reboot]\n", "line 1", "text in a list stands in quotes too"),
        ("sinks:\n  - type: stdout\n", "line 1", "this reads like YAML"),
        ("[imds]\ntimeout_seconds: 5\n", "line 2", "this reads like YAML"),
        ("- type: stdout\n", "line 1", "this reads like YAML"),
        ("url: https://h/?a=b\n", "line 1", "this reads like YAML"),
        ("---\n", "line 1", "this reads like YAML"),
        ('{"sinks": []}\n', "line 1", "this reads like JSON"),
        ("x = 1\nx = 2\n", "line 2", f"x stands here {TWICE} in its table"),
        ("x = 1\nx = 2", "line 2", f"x stands here {TWICE} in its table"),
        ("[imds]\n[vm]\n[imds]\n", "line 3", f"the table imds stands here {TWICE}"),
        ("[sinks]\n[sinks]\n", "line 2", "Each sink begins with two pairs of brackets: [[sinks]]"),
        ("[[sinks]]\n[sinks]\n", "line 2", "Each sink begins with two pairs of brackets: [[sinks]]"),
        ("[sinks]\n[[sinks]]\n", "line 2", "Each sink begins with two pairs of brackets: [[sinks]]"),
        ("name = \u201cabc\u201d\n", "line 1", "typographic quotes"),
        ("name = \u2018abc\u2019\n", "line 1", "typographic quotes"),
        ('name = "abc\u201d\n', "line 1", "typographic quotes"),
        ("\u00a0name = 1\n", "line 1", "no-break space"),
        ("name =\u00a01\n", "line 1", "no-break space"),
        ('directory = "C:\\Users\\x"\n', "line 1", "in single quotes"),
        ('directory = "C:\\ProgramData\\x"\n', "line 1", "in single quotes"),
        ('name = "abc\n', "line 1", "is not closed again on its line"),
        ("name = 'abc\n", "line 2", "is not closed again on its line"),
        ('name = "abc" "def"\n', "line 1", "something stands here after the value"),
        ('a = "x"b = "y"\n', "line 1", "something stands here after the value"),
        ('[[sinks]] type = "x"\n', "line 1", "something stands here after the value"),
        ('a = ["x"\nb = 1\n', "line 2", "a list is not closed with ], or a comma is missing in it"),
        ("[imds\n", "line 1", "must end with ]"),
        ("[[sinks]\n", "line 1", "must end with ]]"),
        ('headers = {\n A = "x"\n}\n', "line 1", "a table in { } stands on one line"),
        ("; a comment\n", "line 1", "a comment begins with #"),
        ("// a comment\n", "line 1", "a comment begins with #"),
        ("<<<<<<< HEAD\n", "line 1", "a merge that was not finished"),
        ("my key = 1\n", "line 1", "a key with blanks stands in quotes"),
        ("schl\u00fcssel = 1\n", "line 1", "a key has only A-Z"),
        ("a = 01\n", "line 1", "no leading 0"),
    ],
)
def test_slip_is_said_in_plain_words(mistake: Callable[[str], str], text: str, where: str, sentence: str) -> None:
    said = mistake(text)
    if "stands on one line" in sentence and "no valid TOML" not in said:
        pytest.skip("tomli, which reads the file on Python 3.10, knows TOML 1.1 and takes it")
    assert f"config.toml is no valid TOML at {where}" in said
    assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "text",
    [
        "secret = hunter2\n",
        'secret = "hunter2\n',
        "secret: hunter2\n",
        'secret = "a" hunter2\n',
        "secret = [hunter2]\n",
        '"hunter2" = 1\n"hunter2" = 2\n',
        "secret = $hunter2\n",
        "secret = \u201chunter2\u201d\n",
        'secret = "C:\\hunter2"\n',
        "hunter2 secret\n",
        '["hunter2"]\n["hunter2"]\n',
    ],
)
def test_no_value_is_shown(mistake: Callable[[str], str], text: str) -> None:
    assert "hunter2" not in mistake(text).partition("config.toml")[2]


def test_tabs_and_windows_line_ends_are_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\t[imds]\r\n\ttimeout_seconds\t=\t3 # three\r\n")
    assert load(path).imds.timeout_seconds == 3
