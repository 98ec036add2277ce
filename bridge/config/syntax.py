"""The plain sentence for a file that is no TOML: what stands at that place, and what to write instead.

The parser names a character that it did not expect; a person has left out quotes, or written YAML. What was probably
meant is told by the parser's message and the line that it points at. No value of the file is ever shown: it may be a
secret. A line that fits nothing here keeps the parser's own words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from bridge.text import one_line

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]#]*?)\s*\]")
_KEY = re.compile(r"""\s*([A-Za-z0-9_.-]+|"[^"]*"|'[^']*')\s*=(.*)""", re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_YAML = re.compile(r"\s*(-\s|-$|---|(-\s+)?[A-Za-z_][A-Za-z0-9_.-]*\s*:(\s|$))")
_TWICE = re.compile(r"Cannot (overwrite|declare|mutate|redefine)")
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "enabled"), "true"),
    **dict.fromkeys(("false", "no", "off", "disabled"), "false"),
}
#: What stands after the = without quotes, and what to write instead.
_BARE_VALUES = (
    (re.compile(r"$"), "the value of {key} is missing"),
    (re.compile(r"="), "one = is enough"),
    (re.compile(r"(null|none|nil|~)$", re.IGNORECASE), "TOML has no word for nothing. Leave {key} out"),
    (
        re.compile(r"\$"),
        "a variable is not filled in here. Write the value, or a key that ends in _env where there is one",
    ),
    (re.compile(r"[\[{]"), 'text in a list stands in quotes too: ["...", "..."]'),
    (
        re.compile(r"[+-]?[0-9][0-9_,.]*$"),
        "the value of {key} is no number as TOML writes them: no comma, no leading 0. Text stands in quotes",
    ),
    (
        re.compile(r"[0-9.]+\s*[A-Za-z%]+$"),
        "the value of {key} is a number with a unit. Write the number alone; `explain` says in which unit",
    ),
)
_QUOTES = "\"'"
_TYPOGRAPHIC = "\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u00ab\u00bb\u2032\u2033\u00b4`"

_BACKSLASH = (
    "in double quotes a backslash begins an escape. Write a path of Windows in single quotes, 'C:\\...', or with /"
)
_YAML_FOUND = (
    "this reads like YAML, and the file is TOML: a key is `key = value`, a sink begins with the line [[sinks]]"
)


class Place(NamedTuple):
    """Where the parser stopped, and its message."""

    line: str
    column: int
    """Counted from 1; one beyond the line at its end."""
    message: str

    @property
    def character(self) -> str:
        """Return the character that the parser did not expect; empty at the end of the line."""
        return self.line[self.column - 1 : self.column]


def plain_sentence(place: Place) -> str:
    """Return what is wrong at *place* and what to write, without a full stop."""
    for rule in _RULES:
        found = rule(place)
        if found:
            return found
    return one_line(place.message)


def _twice(place: Place) -> str | None:
    if not _TWICE.match(place.message):
        return None
    header, key = _HEADER.match(place.line), _KEY.match(place.line)
    if header is not None and header[2] == "sinks":
        return "sinks stands here for another time. Each sink begins with two pairs of brackets: [[sinks]]"
    if header is not None:
        return f"the table {_named(header[2])} stands here for the second time. Put all its keys below one header"
    name = "a key" if key is None else _named(key[1])
    return f"{name} stands here for the second time in its table. Keep one of them"


def _named(key: str) -> str:
    """Return a *key* as a message may show it: what is no plain key may be anything."""
    return key if _BARE_KEY.fullmatch(key) else "of this name"


def _unseen(place: Place) -> str | None:
    character = place.character
    if not character or character.isascii() or not (character.isspace() or unicodedata.category(character) == "Cf"):
        return None
    name = unicodedata.name(character, "of no name").lower()
    return f"here stands a character that looks like a blank or like nothing, and is none ({name}). Write a blank"


def _typographic(place: Place) -> str | None:
    is_opening = place.character in _TYPOGRAPHIC if place.character else False
    is_closing = "Illegal character" in place.message and any(each in _TYPOGRAPHIC for each in place.line)
    if is_opening or is_closing:
        return 'these are typographic quotes. Write straight ones: "..."'
    return None


def _escape(place: Place) -> str | None:
    words = ("Unescaped '\\'", "hex value", "Unicode scalar", "scalar value")
    return _BACKSLASH if any(word in place.message for word in words) else None


def _yaml(place: Place) -> str | None:
    if place.message.startswith(("Expected '='", "Invalid statement")) and _YAML.match(place.line):
        return _YAML_FOUND
    if place.message.startswith("Invalid statement") and place.character == "{":
        return (
            "this reads like JSON, and the file is TOML: a key is `key = value`, a sink begins with the line [[sinks]]"
        )
    return None


def _statement(place: Place) -> str | None:
    if not place.message.startswith("Invalid statement"):
        return None
    if place.line.lstrip().startswith((";", "//", "--", "/*")):
        return "a comment begins with #"
    if place.line.startswith(("<<<<<<<", "=======", ">>>>>>>")):
        return "this is the mark of a merge that was not finished. Keep one of the two versions"
    return "here must stand a key, such as `key = value`, or a header, such as [imds]"


def _header(place: Place) -> str | None:
    if "table declaration" in place.message or "array declaration" in place.message:
        brackets = "]]" if "array" in place.message else "]"
        return f"the header of a table must end with {brackets} right after its name, and its name has no blanks"
    return None


def _open_text(place: Place) -> str | None:
    if place.message.startswith(("Unterminated string", "Illegal character", 'Expected "\'"', "Expected \"'''\"")):
        return "text in quotes begins and is not closed again on its line"
    return None


def _list(place: Place) -> str | None:
    if place.message.startswith("Unclosed array"):
        return "a list is not closed with ], or a comma is missing in it"
    return None


def _inline_table(place: Place) -> str | None:
    if "initial character for a key part" in place.message and "{" in place.line:
        return "a table in { } stands on one line, without a comma before the }. Or give it a header, such as [labels]"
    if "Unclosed inline table" in place.message:
        return "a table in { } is not closed with } on its line, or a comma is missing in it"
    return None


def _key(place: Place) -> str | None:
    if not place.message.startswith("Expected '='"):
        return None
    if place.character and not place.character.isascii():
        return "a key has only A-Z, a-z, 0-9, hyphens and underscores, unless it stands in quotes"
    return "after a key comes =, and a key with blanks stands in quotes: `key = value`"


def _value(place: Place) -> str | None:
    is_rest = place.message.startswith("Expected newline")
    if not is_rest and not place.message.startswith("Invalid value"):
        return None
    found = _KEY.match(place.line)
    key, value = ("key", place.line[place.column - 1 :]) if found is None else (_named(found[1]), found[2])
    key, value = (key if key != "of this name" else "key"), value.partition("#")[0].strip()
    if is_rest and (found is None or value[:1] in tuple(_QUOTES)):
        return "something stands here after the value. A line has one key; text with a quote in it stands in '...'"
    return _unquoted(key, value)


def _unquoted(key: str, value: str) -> str:
    """Return what to write for a *value* that stands there without quotes."""
    if value.lower() in _BOOLEANS:
        return f"write `{key} = {_BOOLEANS[value.lower()]}`: TOML knows true and false alone, in small letters"
    found = (sentence for pattern, sentence in _BARE_VALUES if pattern.match(value))
    return next(found, 'text stands in quotes: {key} = "..."').format(key=key)


_RULES: tuple[Callable[[Place], str | None], ...] = (
    _twice, _escape, _typographic, _unseen, _yaml, _statement, _header, _list, _inline_table, _open_text, _key, _value,
)  # fmt: skip
