"""`check-config` of a file that is refused: what else its known keys say that is wrong here, or may surprise.

The settings of such a file do not exist, so what can be looked at alone is looked at in the file as it was parsed: its
mistakes are mended in one go, and no file that is missing comes to light only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge.cli.check_local import PEM_KEYS, open_secrets, unusable_files
from bridge.config.known_keys import known_tables
from bridge.config.loader import parsed
from bridge.config.secret_keys import readable_secrets, secret_files
from bridge.errors import ConfigurationError


def whole_error(error: ConfigurationError, file: Path | None, *, connect: bool) -> ConfigurationError:
    """Return *error* with what else is wrong with *file*, and with what may surprise as its remarks."""
    wrong, warnings = _beside(error, file)
    remarks = [f"Warning: {warning}" for warning in warnings]
    if connect:
        remarks.append("No destination was tried: that needs a configuration that can be used.")
    return ConfigurationError(*error.mistakes, *wrong, file=error.file, remarks=tuple(remarks))


def _beside(error: ConfigurationError, file: Path | None) -> tuple[list[str], list[str]]:
    try:
        table = {} if file is None else parsed(file)
    except ConfigurationError:  # then that is its mistake
        return [], []
    wrong: list[str] = []
    warnings: list[str] = []
    for where, values in known_tables(table):
        wrong += [f"{where}: {why}" for why in unusable_files(_unsaid(values, error))]
        given = {name: value for name, value in values.items() if value is not None}
        warnings += [f"{where}: {why}" for why in (*open_secrets(values), *readable_secrets(secret_files(given)))]
    return wrong, warnings


def _unsaid(values: dict[str, Any], error: ConfigurationError) -> dict[str, Any]:
    """Return *values* that can name a file, without the certificates when a mistake speaks of one of them already."""
    named = {name: value for name, value in values.items() if isinstance(value, str) and "\0" not in value}
    certificates = {named[name] for name in PEM_KEYS & named.keys()}
    is_said = any(each in mistake for each in certificates for mistake in error.mistakes)
    return {name: value for name, value in named.items() if not (is_said and name in PEM_KEYS)}
