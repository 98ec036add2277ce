"""Finds the secret files and secret environment variables that a configuration refers to.

Settings that refer to a secret always end in ``_file`` or ``_env``, even in third-party sinks. The functions search the
parsed configuration for keys with these suffixes.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_FILE, _VARIABLE = "_file", "_env"
#: Files without a secret. A client certificate contains the key if no separate key file is configured.
_PUBLIC = frozenset({"ca_file", "public_key_file", "template_file"})
_CERTIFICATE, _KEY = "client_cert_file", "client_key_file"
#: The variables with secrets that the agent's own credentials read (azure-identity: EnvironmentCredential, managed
#: identity of App Service and Azure Arc), and those of `[telemetry]`.
CREDENTIAL_VARIABLES = frozenset(
    {
        "AZURE_CLIENT_SECRET",
        "AZURE_CLIENT_CERTIFICATE_PASSWORD",
        "AZURE_PASSWORD",
        "IDENTITY_HEADER",
        "MSI_SECRET",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
    }
)


def secret_variables(table: object) -> frozenset[str]:
    """Return the environment variables that the ``*_env`` keys of *table* name, at any depth."""
    return frozenset(name for _, name in _named(table, _VARIABLE, "") if "\0" not in name)


def secret_files(table: object) -> tuple[tuple[str, str], ...]:
    """Return each key that names a secret file, such as ``sinks[0].url_file``, and the file."""
    return tuple(_named(table, _FILE, ""))


def readable_secrets(files: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return a warning for each of *files* (`secret_files`) that other users can read."""
    found = ((key, _why_readable(file)) for key, file in files)
    return tuple(f"{key}: {why}" for key, why in found if why is not None)


def _why_readable(file: str) -> str | None:
    if sys.platform == "win32":
        return None  # on Windows, the mode does not reflect access control lists
    try:
        found = Path(file).stat()
    except OSError:
        return None  # the code that reads the secret reports this error
    # The groups of the agent's user are unknown if this process runs as root or cannot read the file.
    is_known = os.geteuid() != 0 and os.access(file, os.R_OK)
    is_foreign_group = is_known and found.st_gid not in {0, os.getegid(), *os.getgroups()}
    foreign = "".join(
        who for who, bit in (("g", stat.S_IRGRP * is_foreign_group), ("o", stat.S_IROTH)) if found.st_mode & bit
    )
    if not foreign:
        return None
    mode = stat.S_IMODE(found.st_mode)
    return (
        f"{file} contains a secret, and other users can read it: its mode is {mode:04o}. Run chmod {foreign}-r "
        f"{file}, and make sure that the file belongs to the service's user or group."
    )


def _named(value: Any, ending: str, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            where = f"{path}.{key}" if path else str(key)
            if str(key).endswith(ending) and not _is_public(key, value):
                yield from ((where, text) for text in _texts(inner))
            yield from _named(inner, ending, where)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _named(inner, ending, f"{path}[{number}]")


def _is_public(key: str, table: Mapping[str, Any]) -> bool:
    return key in _PUBLIC or (key == _CERTIFICATE and _KEY in table)


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str) and text]
