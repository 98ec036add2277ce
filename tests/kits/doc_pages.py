"""Parses the Markdown pages of this repository: sections, tables, fenced blocks, and words in backticks."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

#: In a list, a block and its comment are indented.
_FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>[^>]*?) -->\n(?P=indent))?```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_SPAN = re.compile(r"`([^`\n]+)`")


class Block(NamedTuple):
    """A fenced block: the comment before it, its language and its text."""

    mark: str
    language: str
    text: str


def page(name: str) -> str:
    """Return the text of the page *name*, a path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def pages() -> list[str]:
    """Return the names of all user-facing pages, as paths from the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "bridge").rglob("*.md"), *(ROOT / "sinks").glob("*.md")]
    found += [*(ROOT / "deploy").rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def book(*folders: str) -> str:
    """Return the README, or the pages of *folders* in docs/ as one page with page titles at heading level 2."""
    if not folders:
        return "\n".join([page("README.md"), book("start", "concepts", "howto", "reference", "operate")])
    found = [path for folder in folders for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return "\n".join(_one_level_down(path.read_text(encoding="utf-8")) for path in found)


def _one_level_down(text: str) -> str:
    fences = [(each.start(), each.end()) for each in _FENCE.finditer(text)]

    def deeper(found: re.Match[str]) -> str:
        is_code = any(start <= found.start() < end for start, end in fences)
        return found[0] if is_code else f"#{found[0]}"

    return re.sub(r"^#{1,5} ", deeper, text, flags=re.MULTILINE)


def blocks(text: str, language: str = "") -> list[Block]:
    """Return the fenced blocks of *text* in order, optionally only those in *language*."""
    found = [Block(each["mark"] or "", each["language"], dedent(each["text"])) for each in _FENCE.finditer(text)]
    return [each for each in found if not language or each.language == language]


def marked(text: str, mark: str) -> str:
    """Return the text of the one block after the comment *mark*."""
    [found] = [each.text for each in blocks(text) if each.mark == mark]
    return found


def section(text: str, heading: str, level: int = 2) -> str:
    """Return the section below *heading*, up to the next heading of its *level* or above."""
    hashes = "#" * level
    found = re.search(rf"^{hashes} {re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"There is no heading {hashes} {heading}"
    return found[1]


def headings(text: str, level: int) -> list[str]:
    """Return the headings of *level* in *text*, in order."""
    return re.findall(rf"^{'#' * level} (.+)$", text, re.MULTILINE)


def table(text: str, first: str) -> list[list[str]]:
    """Return the cells of each row of the table in *text* whose first column header is *first*."""
    found = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-| :]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, f"There is no table that begins with {first}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in found[1].splitlines()]


def spans(text: str) -> list[str]:
    """Return the words in backticks in *text*, outside of fenced blocks."""
    return _SPAN.findall(_FENCE.sub("", text))
