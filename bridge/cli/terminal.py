"""Prints tables, wrapped lines, colors, and messages.

Output that is not written to a terminal has no colors, and its lines are not wrapped.

The module does not use the rich library for tables. On a narrow terminal, rich splits long EventIds, and users could
not copy a split EventId.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import zip_longest
from typing import Literal, TextIO

import click

from bridge.text import duration, escaped, one_line

#: Readable on a dark and on a light background.
Colour = Literal["green", "bright_red"]
_MINUTE, _HOUR = 60, 3_600
_KIB = 1_024


class Table:
    """A table that keeps the column widths of its first rows."""

    def __init__(self, header: Sequence[str], *, widths: Sequence[int] = ()) -> None:
        """Create a table with columns of at least *widths*."""
        self._header = tuple(header)
        self._is_headed = False
        self._widths = [max(width, least) for width, least in zip_longest(map(len, header), widths, fillvalue=0)]

    def add(self, rows: Iterable[Sequence[str]]) -> None:
        """Print *rows*."""
        for line in self.lines(rows):
            click.echo(line)

    def lines(self, rows: Iterable[Sequence[str]]) -> list[str]:
        """Return *rows* as lines. The first call also returns the header."""
        cells = [tuple(map(one_line, row)) for row in rows]
        if not cells:
            return []
        for row in cells:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        head = [] if self._is_headed else [styled(self._line(self._header), bold=True)]
        self._is_headed = True
        return [*head, *map(self._line, cells)]

    def _line(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()


def styled(text: str, *, bold: bool = False, colour: Colour | None = None) -> str:
    """Return *text* with a style if standard output is a terminal and NO_COLOR is not set."""
    if not is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, bold=bold or None, fg=colour)


def is_terminal(to: TextIO | None = None) -> bool:
    """Return whether *to*, by default standard output, is a terminal."""
    stream = to or sys.stdout
    return stream is not None and stream.isatty()


def wrapped(text: str, *, indent: str = "", first: str | None = None, to: TextIO | None = None) -> list[str]:
    """Wrap *text* to the terminal's width. If *to* is not a terminal, return a single line.

    *first* is the prefix of the first line, and *indent* is the prefix of the other lines.
    """
    first = indent if first is None else first
    if not is_terminal(to):
        return [f"{first}{one_line(text)}"]
    width = max(shutil.get_terminal_size().columns, 40)
    lines = textwrap.wrap(one_line(text), width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return lines or [first.rstrip()]


def countdown(seconds: float) -> str:
    """Describe a time *seconds* from now, such as "in 12 min 30 s", "now", or "4 min ago"."""
    if abs(seconds) < 1:
        return "now"
    return f"in {duration(seconds)}" if seconds > 0 else ago(-seconds)


def ago(seconds: float) -> str:
    """Describe a past time, such as "4 min ago". Between 1 and 60 minutes, omit the seconds."""
    if _MINUTE <= seconds < _HOUR:
        return f"{int(seconds // _MINUTE)} min ago"
    return f"{seconds:.1f} s ago" if 0 <= seconds < 1 else f"{duration(seconds)} ago"


def utc(moment: datetime) -> str:
    """Format *moment* in UTC, such as "2026-11-20 11:00:03Z"."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}Z"


def size(count: int) -> str:
    """Format *count* bytes, such as "620 KiB" or "1.2 MiB"."""
    if count < _KIB * _KIB:
        return f"{count / _KIB:.0f} KiB"
    return f"{count / _KIB / _KIB:.1f} MiB"


def counted(number: int, noun: str) -> str:
    """Return *number* with *noun* in the singular or plural, such as "2 records"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def say(*sentences: str) -> None:
    """Print *sentences* on standard error, and escape control characters."""
    for text in (escaped(line) for sentence in sentences for line in sentence.split("\n")):
        for line in wrapped(text, first="", indent="  ", to=sys.stderr):
            click.echo(line, err=True)


def complain(*sentences: str, code: int) -> int:
    """Print *sentences* on standard error, marked as errors for the journal. Return *code*."""
    from bridge.logs import is_journal  # noqa: PLC0415  # only if a command fails

    error = "<3>" if is_journal(sys.stderr) else ""
    say(*(error + line for sentence in sentences for line in sentence.split("\n")))
    return code
