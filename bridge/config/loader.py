"""Reads the configuration file into the settings, and finds the file and the state directory.

Every value is checked before the agent does anything, and all mistakes are told at once. Nothing unknown is passed
over: a misspelt key that is ignored looks like one that works. Secrets never stand in the file; sinks have ``*_file``
and ``*_env`` keys for them. The settings themselves, with their reference, are in `bridge.config.settings`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bridge.config.approval import ApprovalSettings, RemoteSettings, read_approval
from bridge.config.mistakes import Problems
from bridge.config.overrides import mistakes_in, overridden
from bridge.config.secret_keys import secret_files, secret_variables
from bridge.config.settings import (
    HeartbeatSettings,
    ImdsSettings,
    Settings,
    SinkSettings,
    StateSettings,
    StatusSettings,
    TopSettings,
    VmSettings,
    documented,
)
from bridge.config.sinks import read_sinks
from bridge.config.toml import convert
from bridge.errors import ConfigurationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

__all__ = [
    "CONFIG_VARIABLE",
    "HeartbeatSettings",
    "ImdsSettings",
    "Settings",
    "SinkSettings",
    "StateSettings",
    "StatusSettings",
    "VmSettings",
    "configuration_in_words",
    "documented",
    "find_config",
    "load",
    "load_top",
    "parsed",
    "read",
    "service_directory",
    "state_directory",
]

CONFIG_VARIABLE = "SCHEDULED_EVENTS_BRIDGE_CONFIG"
_OURS = "scheduled-events-bridge"
_POSITION = re.compile(r" \(at (line (\d+), column (\d+)|end of document)\)$")
_WINDOWS = os.name == "nt"
_NO_ENVIRONMENT: Mapping[str, str] = {}


def load(path: Path | None, environ: Mapping[str, str] = _NO_ENVIRONMENT) -> Settings:
    """Return the settings of the file at *path*, and what *environ* sets in its place (`bridge.config.overrides`).

    None stands for the defaults, with one stdout sink. Raises ConfigurationError with every mistake of both.
    """
    try:
        settings = read({} if path is None else parsed(path))
    except ConfigurationError as error:
        raise ConfigurationError(*error.mistakes, *mistakes_in(environ), file=path) from error
    return overridden(msgspec.structs.replace(settings, file=path), environ)


def load_top(path: Path | None, environ: Mapping[str, str] = _NO_ENVIRONMENT) -> TopSettings:
    """Return the settings of the file at *path* without its sinks and approvals, with the overrides of *environ*.

    Sinks and approvals are not read, so mistakes in their tables are not found, and no sink type is imported.
    """
    mistakes = Problems()
    table = {} if path is None else parsed(path)
    rest = {key: value for key, value in table.items() if key not in {"sinks", "approval"}}
    top = convert(rest, TopSettings, "", mistakes, elsewhere=_where_keys_belong())
    sentences = (*mistakes.sentences, *mistakes_in(environ))
    if top is None or sentences:
        raise ConfigurationError(*sentences, file=path)
    values = {name: getattr(top, name) for name in top.__struct_fields__}
    return overridden(Settings(**values, sinks=(), file=path), environ)


def read(table: Mapping[str, Any]) -> Settings:
    """Return the settings of a parsed file; raise ConfigurationError with every mistake of it."""
    mistakes = Problems()
    rest = {key: value for key, value in table.items() if key not in {"sinks", "approval"}}
    elsewhere = _where_keys_belong()
    top = convert(rest, TopSettings, "", mistakes, elsewhere=elsewhere)
    sinks = read_sinks(table.get("sinks", ()), mistakes, elsewhere, labels=None if top is None else top.labels)
    approval = read_approval(table["approval"], mistakes, elsewhere) if "approval" in table else None
    if mistakes.sentences or top is None:
        from bridge.config.odd_values import odd_texts  # noqa: PLC0415  # only a file that is wrong pays for it

        raise ConfigurationError(*mistakes.sentences, *odd_texts(table))
    values = {name: getattr(top, name) for name in top.__struct_fields__} | {"approval": approval}
    variables = secret_variables(table).union(*(sink.sink_class.secret_variables(sink.config) for sink in sinks))
    return Settings(
        **values,
        sinks=tuple(_withholding(sink, variables) for sink in sinks),
        secret_variables=variables,
        secret_files=secret_files(table),
    )


def _withholding(sink: SinkSettings, variables: frozenset[str]) -> SinkSettings:
    config = sink.sink_class.withholding(sink.config, variables)
    return msgspec.structs.replace(sink, config=config)


def _where_keys_belong() -> dict[str, str]:
    """Return, for each key of the file, a hint for when it stands in another table."""
    hints = {"sink": " Write each sink as a table of its own: [[sinks]]."}
    for path, struct in (("approval.remote", RemoteSettings), ("approval", ApprovalSettings)):
        hints |= {field.name: f" {field.name} belongs in [{path}]." for field in msgspec.structs.fields(struct)}
    for section in msgspec.structs.fields(TopSettings):
        hints[section.name] = f" {section.name} belongs at the top of the file, before the first [table]."
        if isinstance(section.default, msgspec.Struct | dict | None) or section.default_factory is dict:
            hints[section.name] = f" [{section.name}] is a table of its own."
        if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct):
            for field in msgspec.structs.fields(section.type):
                hints[field.name] = f" {field.name} belongs in [{section.name}]."
    return hints


def parsed(path: Path) -> dict[str, Any]:
    """Return the file at *path* as TOML has it; raise ConfigurationError when it cannot be read or is none."""
    try:
        # A byte order mark is what Windows editors put there; TOML is UTF-8.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as exc:
        advice = "Ask as root (sudo)" if isinstance(exc, PermissionError) and not _WINDOWS else "Mend that"
        raise ConfigurationError(
            f"The configuration {path} cannot be read: {exc.strerror or exc}. {advice}, or name another file."
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(
            f"The configuration {path} is no UTF-8 text: byte {exc.start} is {exc.object[exc.start]:#04x}. "
            "Save it as UTF-8."
        ) from exc
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigurationError(_syntax(path, text, str(exc))) from exc
    except (ValueError, RecursionError) as exc:
        # a whole number of thousands of digits, or brackets nested thousands deep
        raise ConfigurationError(f"The configuration {path} cannot be understood: {exc}.") from exc
    return table


def _syntax(path: Path, text: str, message: str) -> str:
    """Return the sentence for a syntax error, with line and column also where the parser says "end"."""
    from bridge.config.syntax import Place, plain_sentence  # noqa: PLC0415  # only a file that is wrong pays for it

    found = _POSITION.search(message)
    lines = text.replace("\r\n", "\n").split("\n")
    if found is not None and found.group(2):
        number, column = int(found.group(2)), int(found.group(3))
        where = f"line {number}, column {column}"
    else:
        where = f"line {len(lines)}, column {len(lines[-1]) + 1}, the end of the file"
        number = max((count for count, line in enumerate(lines, start=1) if line.strip()), default=1)
        column = len(lines[number - 1]) + 1
    line = lines[number - 1] if number <= len(lines) else ""
    what = plain_sentence(Place(line, column, _POSITION.sub("", message)))
    return f"The configuration {path} is no valid TOML at {where}: {what}."


def find_config(explicit: Path | None, environ: Mapping[str, str], *, windows: bool = _WINDOWS) -> Path | None:
    """Return the file to read: *explicit*, else the environment's, else the system's; None when there is none.

    Raises ConfigurationError when a file that was asked for does not exist.
    """
    variable = environ.get(CONFIG_VARIABLE, "")
    asked = explicit or (Path(variable) if variable else None)
    if asked is None:
        system = _system_config(environ, windows=windows)
        return system if _is_there(system) else None
    if not _is_there(asked):
        who = "--config" if explicit else f"${CONFIG_VARIABLE}"
        raise ConfigurationError(
            f"The configuration {asked}, named by {who}, does not exist. Make it, or name another."
        )
    return asked


def _system_config(environ: Mapping[str, str], *, windows: bool) -> Path:
    return (_program_data(environ) / _OURS if windows else Path("/etc", _OURS)) / "config.toml"


def configuration_in_words(file: Path | None, environ: Mapping[str, str], *, windows: bool = _WINDOWS) -> str:
    """Return the path of *file*; for None that there is none, and where it was looked for."""
    if file is not None:
        return str(file.absolute())
    system = _system_config(environ, windows=windows)
    return f"none, so the defaults; looked for --config, ${CONFIG_VARIABLE} and {system}"


def service_directory(*, windows: bool = _WINDOWS) -> Path:
    """Return the state directory of the agent that runs as this machine's service."""
    return _program_data({}) / _OURS / "state" if windows else Path("/var/lib", _OURS)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # A folder we may not look into: better the error of reading it than to run on defaults.
        return True


def state_directory(
    settings: TopSettings, environ: Mapping[str, str], *, windows: bool = _WINDOWS, is_root: bool | None = None
) -> Path:
    """Return the directory of the outbox; it need not exist yet.

    That is the configured one, else the first of $STATE_DIRECTORY (systemd.exec), else the system's for root, else
    the user's state home (XDG Base Directory Specification); on Windows below %ProgramData%.
    """
    if settings.state.directory is not None:
        return Path(settings.state.directory)
    given = environ.get("STATE_DIRECTORY", "").split(";" if windows else ":")[0]
    if given:
        return Path(given)
    if windows:
        return _program_data(environ) / _OURS / "state"
    if is_root if is_root is not None else _we_are_root():
        return service_directory(windows=False)
    home = Path(environ.get("XDG_STATE_HOME", ""))
    # The specification says to ignore a relative path.
    return (home if home.is_absolute() else _home(environ) / ".local/state") / _OURS


def _we_are_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError as exc:
        raise ConfigurationError(
            "There is no home directory to keep the state in. Set directory in the [state] table, or $STATE_DIRECTORY."
        ) from exc


def _program_data(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("PROGRAMDATA") or environ.get("ProgramData") or r"C:\ProgramData")
