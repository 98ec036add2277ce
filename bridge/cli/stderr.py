"""Messages of commands on standard error: one sentence per line, wrapped to the width of a terminal."""

from __future__ import annotations

import io
import sys

import click

from bridge.errors import ConfigurationError
from bridge.text import escaped


def say(*sentences: str) -> None:
    """Say the *sentences*, with an escape in place of what could not be seen."""
    from bridge.cli.terminal import is_terminal, wrapped  # noqa: PLC0415  # a run that fails at nothing needs none

    for text in (escaped(line) for sentence in sentences for line in sentence.split("\n")):
        # A command to copy stays on one line, however long: the terminal may break it.
        is_whole = "runuser " in text or not is_terminal(sys.stderr)
        for line in [text] if is_whole else wrapped(text, first="", indent="  ", to=sys.stderr):
            click.echo(line, err=True)


def complain(*sentences: str, code: int) -> int:
    """Say the *sentences*; return *code*."""
    say(*sentences)
    return code


def complain_of_mistakes(error: ConfigurationError, *, code: int) -> int:
    """Say the mistakes, on a terminal below the name of their file; return *code*."""
    from bridge.cli.terminal import counted, is_terminal, styled  # noqa: PLC0415

    if is_terminal(sys.stderr) and error.file is not None and str(error.file) not in error.mistakes[0]:
        title = f"{counted(len(error.mistakes), 'mistake')} in {escaped(str(error.file))}:"
        click.echo(styled(title, bold=True, colour="bright_red", to=sys.stderr), err=True)
    return complain(*error.mistakes, code=code)


def complain_of_usage(error: click.ClickException) -> int:
    """Say what click says of a command that was used wrongly; return its exit code."""
    said = io.StringIO()
    error.show(said)
    is_file = isinstance(error, click.UsageError) and _has_a_file_for_an_argument(error)
    hint = ". The configuration is named with --config FILE." if is_file else ""
    return complain(said.getvalue().rstrip("\n") + hint, code=error.exit_code)


def _has_a_file_for_an_argument(error: click.UsageError) -> bool:
    """Return whether an argument too many may be the file that belongs behind --config."""
    options = () if error.ctx is None else error.ctx.command.params
    takes_file = any("--config" in each.opts and not getattr(each, "is_flag", False) for each in options)
    return takes_file and "unexpected extra argument" in error.message
