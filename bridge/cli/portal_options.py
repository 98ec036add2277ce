"""How commands that talk to a portal are told of it: by options that are keys of ``[approval.remote]``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from bridge.config.approval import RemoteSettings
from bridge.config.mistakes import Problems
from bridge.config.toml import convert


def remote_of(table: Mapping[str, object]) -> RemoteSettings:
    """Return the settings in *table*; raise UsageError with every mistake.

    Their keys are none: the table must name one, and who asks here looks at no signature by it.
    """
    problems = Problems()
    unused = {"kid": "unused", "approver": "unused", "public_key_file": "unused"}
    given = {name: str(value) if isinstance(value, Path) else value for name, value in table.items()}
    found = convert({**given, "keys": [unused]}, RemoteSettings, "", problems)
    if found is None:
        raise click.UsageError(" ".join(problems.sentences))
    return found
