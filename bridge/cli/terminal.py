"""What commands print for a person: aligned columns, wrapped lines, and times and sizes in words.

Coloured on a terminal, plain when piped. Columns are aligned here and not by rich, which cuts or breaks an EventId to
fit a narrow terminal: a whole line that the terminal wraps can be copied. A table keeps its widths from one `add` to
the next, so that what `--follow` adds stays under what came before.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TextIO

import click

from bridge.text import duration, one_line

#: Those that can be read on a dark and on a light ground: yellow and cyan are pale on white, blue is dark on black.
Colour = Literal["green", "bright_red"]
_NAME = "scheduled-events-bridge"
_MINUTE, _HOUR = 60, 3_600
_KIB = 1_024


class Table:
    """Rows in aligned columns under a header, which comes with the first of them."""

    def __init__(self, header: Sequence[str], *, widths: Sequence[int] = ()) -> None:
        """Start with columns of at least *widths*, and of the header's."""
        self._header = tuple(header)
        self._is_headed = False
        self._widths = [max(width, least) for width, least in zip_longest(map(len, header), widths, fillvalue=0)]

    def add(self, rows: Iterable[Sequence[str]]) -> None:
        """Print *rows*; columns that they do not fit into grow."""
        for line in self.lines(rows):
            click.echo(line)

    def add_with(self, rows: Iterable[tuple[Sequence[str], Sequence[str]]]) -> None:
        """Print rows, each with sentences below it that are wrapped to the terminal: for one that is narrow."""
        found = list(rows)
        lines = self.lines(cells for cells, _ in found)
        for line in lines[: len(lines) - len(found)]:
            click.echo(line)
        for line, (_, below) in zip(lines[len(lines) - len(found) :], found, strict=True):
            click.echo(line)
            for more in (each for text in below for each in wrapped(text, first=" " * 4, indent=" " * 6)):
                click.echo(more)

    def lines(self, rows: Iterable[Sequence[str]]) -> list[str]:
        """Return *rows* as lines, the header before the first of all."""
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


def styled(text: str, *, bold: bool = False, colour: Colour | None = None, to: TextIO | None = None) -> str:
    """Return *text* in bold or in *colour*, where colours are wanted *to* (default: standard output)."""
    if not (is_terminal(to) and "NO_COLOR" not in os.environ):
        return text
    return click.style(text, bold=bold or None, fg=colour)


def is_terminal(to: TextIO | None = None) -> bool:
    """Return whether a person reads what goes *to* (default: standard output), which may be closed."""
    stream = to or sys.stdout
    return stream is not None and stream.isatty()


def wrapped(text: str, *, indent: str = "", first: str | None = None, to: TextIO | None = None) -> list[str]:
    """Return *text* in lines of the terminal's width, *first* before the first and *indent* before the others.

    Where *to* (default: standard output) is piped it is one line: a program may look for words in it.
    """
    first = indent if first is None else first
    if not is_terminal(to):
        return [f"{first}{one_line(text)}"]
    width = max(shutil.get_terminal_size().columns, 40)
    lines = textwrap.wrap(one_line(text), width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return lines or [first.rstrip()]


def with_label(lines: Sequence[str], label: str) -> list[str]:
    """Return *lines*, of which the first begins with *label*, with that in bold."""
    first, *others = lines
    return [first.replace(label, styled(label, bold=True), 1), *others]


def is_narrower_than(columns: int) -> bool:
    """Return whether a terminal of fewer than *columns* shows the output; a pipe takes lines of any length."""
    return is_terminal() and shutil.get_terminal_size().columns < columns


def in_place(lines: Sequence[str]) -> str:
    """Return what puts *lines* in the place of all that a terminal shows: from its top, and no more than it has.

    Each line erases what is left of the one in its place. A screen that is cleared flickers, and some terminals keep
    every one of them in what scrolled away.
    """
    columns, rows = shutil.get_terminal_size()
    last = lines[-1]
    left = rows - 1 - _rows_of(last, columns)
    shown: list[str] = []
    for number, line in enumerate(lines[:-1]):
        left -= _rows_of(line, columns)
        if left < (number < len(lines) - 2):
            shown.append(f"... {counted(len(lines) - 1 - number, 'more line')}: this terminal is too low.")
            break
        shown.append(line)
    return "\x1b[H" + "".join(f"{line}{_rest_of(line, columns)}\n" for line in (*shown, last)) + "\x1b[J"


def _rows_of(line: str, columns: int) -> int:
    return max(-(-len(click.unstyle(line)) // columns), 1)


def _rest_of(line: str, columns: int) -> str:
    """Return what erases the rest of the row that *line* ends in; in a full one that would be its last character."""
    length = len(click.unstyle(line))
    return "" if length and length % columns == 0 else "\x1b[K"


def countdown(seconds: float) -> str:
    """Return "in 12 min 30 s", "4 min ago" or "now"; *seconds* are those until then."""
    if abs(seconds) < 1:
        return "now"
    return f"in {duration(seconds)}" if seconds > 0 else ago(-seconds)


def ago(seconds: float) -> str:
    """Return "4 min ago": of the past, minutes are exact enough."""
    if _MINUTE <= seconds < _HOUR:
        return f"{int(seconds // _MINUTE)} min ago"
    return f"{seconds:.1f} s ago" if 0 <= seconds < 1 else f"{duration(seconds)} ago"


def utc(moment: datetime) -> str:
    """Return "2026-11-20 11:00:03Z"."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}Z"


def size(count: int) -> str:
    """Return *count* bytes as "620 KiB" or "1.2 MiB"."""
    if count < _KIB * _KIB:
        return f"{count / _KIB:.0f} KiB"
    return f"{count / _KIB / _KIB:.1f} MiB"


def counted(number: int, noun: str) -> str:
    """Return "1 record", "2 records"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def this_command(program: str | None = None, arguments: Sequence[str] | None = None) -> str:
    """Return how to call this command again from where it was called, for a shell.

    *program* is what ran (``sys.argv[0]``), *arguments* the whole command line as it was given (``sys.orig_argv``).
    The name alone is enough only where the PATH leads to that very program, which a venv's is not without activation.
    """
    program, arguments = program or sys.argv[0], arguments or sys.orig_argv
    if Path(program).name == "__main__.py":
        return f"{_quoted(arguments[0])} -m bridge"
    found = shutil.which(_NAME)
    if not os.path.dirname(program) or (found is not None and _is_same(found, program)):  # noqa: PTH120  # as typed
        return _NAME
    return _quoted(program)


def _is_same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:  # on Windows the program is called without its .exe
        return os.path.splitext(one)[0] == os.path.splitext(other)[0]  # noqa: PTH122


def _quoted(path: str) -> str:
    if os.name == "nt":
        return f'"{path}"' if " " in path else path
    return shlex.quote(path)
