"""Finds and reads the configuration file, and finds the state directory.

Before the agent starts, the loader reports all errors in the file at once. Unknown keys are errors, because a
misspelled setting would otherwise be ignored. The settings are defined and documented in `bridge.config.settings`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bridge.config.approval import read_approval
from bridge.config.mistakes import Problems
from bridge.config.secret_keys import CREDENTIAL_VARIABLES, secret_files, secret_variables
from bridge.config.settings import Settings, SinkSettings, TopSettings, documented
from bridge.config.telemetry import push_settings
from bridge.config.toml import convert
from bridge.errors import ConfigurationError
from bridge.text import one_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

__all__ = ["Settings", "SinkSettings", "documented"]  # also exported by this module

CONFIG_VARIABLE = "SCHEDULED_EVENTS_BRIDGE_CONFIG"
_OURS = "scheduled-events-bridge"
_WINDOWS = os.name == "nt"
_NO_ENVIRONMENT: Mapping[str, str] = {}

#: Maps each variable to the key that the variable overrides. A container manifest sets these variables, because the
#: manifest also contains the address of the probes and the volume of the outbox.
OVERRIDES: Mapping[str, str] = {
    "SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN": "status.listen",
    "SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY": "state.directory",
}


def load(path: Path | None, environ: Mapping[str, str] = _NO_ENVIRONMENT) -> Settings:
    """Return the settings of the file at *path*, with `OVERRIDES` from *environ*.

    If *path* is None, return the defaults with one stdout sink. Raises ConfigurationError, which lists all errors.
    """
    try:
        settings = read(_overridden({} if path is None else parsed(path), environ))
        push = None if settings.telemetry is None else push_settings(settings.telemetry, environ)
    except ConfigurationError as error:
        raise ConfigurationError(*error.mistakes, file=path) from error
    overrides = tuple((key, variable) for variable, key in OVERRIDES.items() if environ.get(variable))
    return msgspec.structs.replace(settings, file=path, overrides=overrides, push=push)


def load_top(path: Path | None, environ: Mapping[str, str] = _NO_ENVIRONMENT) -> TopSettings:
    """Return the settings of *path* and *environ*, except the sinks and approvals.

    The sink and approval tables are not validated, and no sink types are imported.
    """
    mistakes = Problems()
    top = _top(_overridden({} if path is None else parsed(path), environ), mistakes)
    if top is None:
        raise ConfigurationError(*mistakes.sentences, file=path)
    return top


def _overridden(table: Mapping[str, Any], environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return *table* with the `OVERRIDES` in *environ*. An empty variable has no effect."""
    for variable, path in OVERRIDES.items():
        section, _, key = path.partition(".")
        value, keys = environ.get(variable), table.get(section, {})
        if value and isinstance(keys, Mapping):
            table = {**table, section: {**keys, key: value}}
    return table


def read(table: Mapping[str, Any]) -> Settings:
    """Return the settings of a parsed file. Raises ConfigurationError with all mistakes."""
    from bridge.config.sinks import read_sinks  # noqa: PLC0415  # imports requests

    mistakes = Problems()
    top = _top(table, mistakes)
    sinks = read_sinks(table.get("sinks", ()), mistakes, labels=None if top is None else top.labels)
    approval = read_approval(table["approval"], mistakes) if "approval" in table else None
    if mistakes.sentences or top is None:
        raise ConfigurationError(*mistakes.sentences)
    values = {name: getattr(top, name) for name in top.__struct_fields__} | {"approval": approval}
    variables = secret_variables(table) | CREDENTIAL_VARIABLES
    return Settings(
        **values,
        sinks=tuple(_without_secrets(sink, variables) for sink in sinks),
        has_default_sinks=not table.get("sinks"),
        secret_variables=variables,
        secret_files=secret_files(table),
    )


def _top(table: Mapping[str, Any], mistakes: Problems) -> TopSettings | None:
    rest = {key: value for key, value in table.items() if key not in {"sinks", "approval"}}
    # `read_sinks` checks the sinks. The key is valid here, so that messages about unknown keys list it.
    return convert(rest, TopSettings, "", mistakes, stricter={"sinks": Any})


def _without_secrets(sink: SinkSettings, variables: frozenset[str]) -> SinkSettings:
    config = sink.sink_class.withholding(sink.config, variables)
    return msgspec.structs.replace(sink, config=config)


def parsed(path: Path) -> dict[str, Any]:
    """Return the parsed file. Raise ConfigurationError if it is unreadable or not TOML."""
    try:
        # Some Windows editors write a byte order mark.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as exc:
        advice = "Correct it"
        if isinstance(exc, PermissionError) and not _WINDOWS:
            advice = (
                "For the service, run chmod 0644 on the file and chmod 0755 on its directory. For a command, use sudo"
            )
        raise ConfigurationError(
            f"The configuration {path} cannot be read: {exc.strerror or exc}. {advice}, or select another file."
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(
            f"The configuration {path} is not UTF-8 text: byte {exc.start} is {exc.object[exc.start]:#04x}. "
            "Save it as UTF-8."
        ) from exc
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # very long integers and very deep nesting also cause these errors
        raise ConfigurationError(f"The configuration {path} is not valid TOML: {one_line(str(exc))}.") from exc
    return table


def find_config(explicit: Path | None, environ: Mapping[str, str], *, windows: bool = _WINDOWS) -> Path | None:
    """Return the configuration file: *explicit*, else that of *environ*, else the default.

    Return None if no file exists. Raises ConfigurationError if the requested file does not exist.
    """
    variable = environ.get(CONFIG_VARIABLE)
    asked = explicit or (Path(variable) if variable else None)
    file = asked or _system_config(environ, windows=windows)
    try:
        exists = file.exists()
    except OSError:
        exists = (
            True  # The directory is unreadable. Reading the file reports this error, which the defaults would hide.
        )
    if asked is not None and not exists:
        who = "--config" if explicit else f"${CONFIG_VARIABLE}"
        raise ConfigurationError(
            f"The configuration {asked}, named by {who}, does not exist. Create it, or select another file."
        )
    return file if exists else None


def _system_config(environ: Mapping[str, str], *, windows: bool) -> Path:
    return (_program_data(environ) if windows else Path("/etc", _OURS)) / "config.toml"


def configuration_in_words(file: Path | None, environ: Mapping[str, str]) -> str:
    """Return the path of *file*. If *file* is None, return the locations that contain no file."""
    if file is not None:
        return str(file.absolute())
    system = _system_config(environ, windows=_WINDOWS)
    return f"none, so the defaults; looked for --config, ${CONFIG_VARIABLE} and {system}"


def service_directory(environ: Mapping[str, str] = os.environ, *, windows: bool = _WINDOWS) -> Path:
    """Return the state directory of the agent that runs as a service of this machine."""
    return _program_data(environ) / "state" if windows else Path("/var/lib", _OURS)


def directory_despite_errors(explicit: Path | None, error: ConfigurationError) -> Path:
    """Return the service's state directory, for a command with an invalid configuration.

    If the service's configuration becomes invalid, a running service keeps using the previous one, so its directory
    does not change. *explicit* is the file that the user passed, or None. If it is set, the function raises *error*,
    because the service might use another file.
    """
    directory = service_directory()
    if explicit is not None or not directory.exists():
        raise error
    return directory


def state_directory(
    settings: TopSettings, environ: Mapping[str, str], *, windows: bool = _WINDOWS, is_root: bool | None = None
) -> Path:
    """Return the state directory, which may not exist yet (`StateSettings.directory`)."""
    if settings.state.directory is not None:
        return Path(settings.state.directory)
    # systemd sets this variable to all directories of the unit.
    given = environ.get("STATE_DIRECTORY", "").split(";" if windows else ":")[0]
    if given:
        return Path(given)
    if windows or (is_root if is_root is not None else _runs_the_service()):
        return service_directory(environ, windows=windows)
    home = Path(environ.get("XDG_STATE_HOME", ""))
    # The XDG Base Directory Specification requires programs to ignore a relative path.
    return (home if home.is_absolute() else _home(environ) / ".local/state") / _OURS


def _runs_the_service() -> bool:
    """Return whether this user is root, or owns the state directory of the service."""
    try:
        return os.geteuid() in {0, service_directory(windows=False).stat().st_uid}
    except OSError:
        return os.geteuid() == 0


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError as exc:
        raise ConfigurationError(
            "No home directory was found for the state. Set state.directory or $STATE_DIRECTORY."
        ) from exc


def _program_data(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("PROGRAMDATA") or r"C:\ProgramData", _OURS)
