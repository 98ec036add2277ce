import pytest

from bridge.text import duration, escaped, nearest, one_line


def test_one_line_replaces_control_characters_with_a_space():
    assert one_line("a\nb\x1b[31mc\u2028d\ud800é") == "a b [31mc d é"


UNSEEN = [
    "\u202e",
    "\u2066",
    "\u2069",
    "\u200f",
    "\u061c",
    "\u200b",
    "\ufeff",
    "\U000e0041",
    "\x9b",
    "\x1b",
    "\n",
    "\ud800",
]


@pytest.mark.parametrize("unseen", UNSEEN, ids=ascii)
def test_invisible_characters_are_replaced_with_an_escape_or_a_space(unseen):
    assert escaped(f"vm{unseen}1") == f"vm{ascii(unseen)[1:-1]}1"
    assert one_line(f"vm{unseen}1") == "vm 1"


@pytest.mark.parametrize("text", ["Grüße, Ωμέγα, 日本 \u00a0", "עברית العربية", "\U0001f600 5 %"])
def test_visible_characters_are_unchanged(text):
    assert escaped(text) == text


def test_one_line_is_truncated_at_its_limit():
    assert one_line("abc\ndef", 4) == "abc "


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (895, "14 min 55 s"),
        (3_600, "1 h"),
        (7_260, "2 h 1 min"),
        (7_199, "1 h 59 min"),
        (600_000, "6 d 22 h"),
    ],
)
def test_duration_uses_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("word", ["Poll-Interval", "poll_intervall", "POLL_INTERVAL"])
def test_nearest_known_word_ignores_case_and_hyphens(word):
    assert nearest(word, ["timeout", "poll_interval"]) == " Did you mean 'poll_interval'?"
