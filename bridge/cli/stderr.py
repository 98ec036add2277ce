"""Messages of commands on standard error: one sentence per line, wrapped to the width of a terminal."""

from __future__ import annotations

import io
import sys

import click

from bridge.errors import ConfigurationError
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


def complain_of_mistakes(error: ConfigurationError, *, code: int) -> int:
    """Print the mistakes, on a terminal below the name of the file; return *code*."""
    from bridge.cli.terminal import counted, is_terminal, styled  # noqa: PLC0415

    if is_terminal(sys.stderr) and error.file is not None and str(error.file) not in error.mistakes[0]:
        title = f"{counted(len(error.mistakes), 'mistake')} in {escaped(str(error.file))}:"
        click.echo(styled(title, bold=True, colour="bright_red", to=sys.stderr), err=True)
    return complain(*error.mistakes, code=code)


def complain_of_usage(error: click.ClickException) -> int:
    """Print the message of click; return the exit code of *error*."""
    output = io.StringIO()
    error.show(output)
    # A file name without --config is the most common mistake.
    params = [] if not isinstance(error, click.UsageError) or error.ctx is None else error.ctx.command.params
    takes_file = any("--config" in each.opts and not getattr(each, "is_flag", False) for each in params)
    is_extra = takes_file and "unexpected extra argument" in error.message
    hint = ". The configuration is named with --config FILE." if is_extra else ""
    return complain(output.getvalue().rstrip("\n") + hint, code=error.exit_code)
