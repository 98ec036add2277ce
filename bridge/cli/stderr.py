"""Messages of commands on standard error: one sentence per line, wrapped to the width of a terminal."""

from __future__ import annotations

import sys

import click

from bridge.text import escaped


def say(*sentences: str) -> None:
    """Print the *sentences*. Control characters are escaped."""
    from bridge.cli.terminal import is_terminal, wrapped  # noqa: PLC0415  # only on an error

    for text in (escaped(line) for sentence in sentences for line in sentence.split("\n")):
        # A command stays on one line, so that it can be copied.
        is_whole = "runuser " in text or not is_terminal(sys.stderr)
        for line in [text] if is_whole else wrapped(text, first="", indent="  ", to=sys.stderr):
            click.echo(line, err=True)


def complain(*sentences: str, code: int) -> int:
    """Print the *sentences*; return *code*."""
    say(*sentences)
    return code
