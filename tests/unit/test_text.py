from __future__ import annotations

import pytest

from bridge.text import duration, escaped, excerpt, nearest, one_line


def test_one_line_shows_a_space_for_what_could_break_a_line_or_move_a_cursor():
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
def test_what_is_not_seen_is_shown_as_its_escape_or_as_a_space(unseen):
    assert escaped(f"vm{unseen}1") == f"vm{ascii(unseen)[1:-1]}1"
    assert one_line(f"vm{unseen}1") == "vm 1"


@pytest.mark.parametrize("text", ["Grüße, Ωμέγα, 日本 \u00a0", "עברית العربية", "\U0001f600 5 %"])
def test_what_is_seen_stays_as_it_is(text):
    assert escaped(text) == text


def test_one_line_is_cut_at_its_limit():
    assert one_line("abc\ndef", 4) == "abc "


def test_excerpt_of_anything_is_short_and_printable():
    assert excerpt(b"\xff\x00" + "é".encode() * 9999).isprintable()
    assert len(excerpt("\U0001f600".encode() * 9999)) == 256


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
def test_duration_is_in_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("word", ["Poll-Interval", "poll_intervall", "POLL_INTERVAL"])
def test_nearest_known_word_is_found_whatever_its_case_and_hyphens(word):
    assert nearest(word, ["timeout", "poll_interval"]) == " Did you mean 'poll_interval'?"


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("retry_max_seconds", ["refresh_seconds", "timeout_seconds"], ""),
        ("retry_max_seconds", ["retry_statuses"], ""),
        ("headers_env", ["headers_file", "url_file"], "headers_file"),
        ("poll_intervall", ["poll_interval_seconds"], "poll_interval_seconds"),
        ("wait_seconds", ["idle_close_seconds", "max_age_seconds"], ""),
        ("tiemout_seconds", ["refresh_seconds", "timeout_seconds"], "timeout_seconds"),
        ("time_out_secs", ["refresh_seconds", "timeout_seconds"], "timeout_seconds"),
        ("max_seconds", ["timeout_seconds", "max_age_seconds"], "max_age_seconds"),
        ("hmac_secret_file", ["ca_file", "secret_file"], "secret_file"),
        ("timeout", ["timeout_seconds"], "timeout_seconds"),
    ],
)
def test_an_ending_or_a_beginning_alone_makes_no_word_near(word, known, meant):
    assert nearest(word, known) == (f" Did you mean {meant!r}?" if meant else "")


def test_nearest_keeps_the_known_spelling():
    assert nearest("pagersnk", ["PagerSink"]) == " Did you mean 'PagerSink'?"


def test_nothing_is_near_a_strange_word():
    assert nearest("zebra", ["timeout"]) == ""
