# ruff: noqa: INP001
"""Generates the manual page and the shell completions from the agent's commands.

    PYTHON -I shell_files.py LIBRARIES OUT EPOCH

LIBRARIES is a directory that contains the unpacked wheels of the agent and its dependencies. OUT has the same layout as
/usr/share. build.py adds the generated files to the archive and to the packages.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

NAME = "scheduled-events-bridge"
COMPLETE = "_SCHEDULED_EVENTS_BRIDGE_COMPLETE"
COMPLETIONS = {
    "bash": f"bash-completion/completions/{NAME}",
    "zsh": f"zsh/site-functions/_{NAME}",
    "fish": f"fish/vendor_completions.d/{NAME}.fish",
}
MANUAL = f"man/man1/{NAME}.1"


def escaped(text: str) -> str:
    """Escape *text* for roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"(?m)^(?=[.'])", r"\\&", text)


def marked_up(text: str) -> Iterator[str]:
    """Convert a help text to roff.

    Paragraphs with click's no-wrap mark keep their line breaks.
    """
    for number, part in enumerate(re.split(r"\n[ \t]*\n", inspect.cleandoc(text))):
        if number:
            yield ".PP"
        if part.startswith("\b"):
            yield from (".nf", escaped(part.removeprefix("\b").strip("\n")), ".fi")
        else:
            yield escaped(" ".join(part.split()))


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its path, such as ``("outbox", "list")``."""
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        if inner:
            yield from leaves(command, (*path, name))  # type: ignore[arg-type]  # it has commands, so it is a group
        else:
            yield (*path, name), command


def of_command(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    """Yield the section of the manual for one command."""
    click = import_module("click")
    context = click.Context(command, info_name=" ".join((NAME, *path)))
    usage = " ".join((*path, *command.collect_usage_pieces(context)))
    yield f".SS {escaped(usage)}"
    yield from marked_up(command.help or "")
    for parameter in command.params:  # these do not include --help
        record = parameter.get_help_record(context)
        if record is not None:
            yield from (".TP", f"\\fB{escaped(record[0])}\\fR", escaped(" ".join(record[1].split())))
    if command.epilog:
        yield from (".PP", *marked_up(command.epilog))


def manual(commands: click.Group, exit_codes: Any, day: str) -> str:
    """Return the manual page with the commands, the files, and the exit codes."""
    lines = [
        f'.TH {NAME.upper()} 1 "{day}" "{NAME} {version(NAME)}" "User Commands"',
        ".SH NAME",
        f"{escaped(NAME)} \\- {escaped(first_sentence(commands.help))}",
        ".SH SYNOPSIS",
        f".B {escaped(NAME)}",
        "COMMAND [OPTIONS]",
        ".SH FILES AND ENVIRONMENT",
        *marked_up(commands.epilog or ""),
        ".SH COMMANDS",
    ]
    for path, command in leaves(commands):
        lines += of_command(path, command)
    lines.append(".SH EXIT STATUS")
    for code in exit_codes:
        lines += [".TP", f".B {code.value}", escaped(code.name.lower().replace("_", " "))]
    lines += [".SH SEE ALSO", escaped(f"systemctl(1), journalctl(1); {NAME} schema --config describes every key.")]
    return "\n".join(lines) + "\n"


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a help text in lower case and without a period."""
    sentence = inspect.cleandoc(text or "").partition(".\n")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def main() -> None:
    """Write the manual page and the completions."""
    libraries, out, epoch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, libraries)
    command_line = import_module("bridge.cli.commands")
    completion = import_module("click.shell_completion")
    day = datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%d")
    files = {MANUAL: manual(command_line.commands, command_line.ExitCode, day)}
    for shell, path in COMPLETIONS.items():
        complete = completion.get_completion_class(shell)(command_line.commands, {}, NAME, COMPLETE)
        files[path] = complete.source()
    for path, text in files.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
