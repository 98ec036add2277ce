"""The digest of a sink's configuration, as far as it decides how the destination responds to requests.

The digest covers the table of the sink, and the content of each file and variable that a key ending in ``_file`` or
``_env`` names. A URL in a file is as much the endpoint as a URL in the table. Files are read at each call, so call
`digest` only where a file system that hangs does no harm.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from bridge.sink import Sink, SinkConfig
from bridge.system.secrets import ChangingFile

_ABSENT = "-"


class ResolvedConfiguration:
    """The resolved configuration of the sink *sink_class* with *config*; only its digest leaves this object."""

    def __init__(self, sink_class: type[Sink], config: SinkConfig, *, environ: Mapping[str, str] = os.environ) -> None:
        keys = msgspec.structs.asdict(config)
        variables = {key: environ.get(name) for key, name in _named(keys, "_env")}
        self._fixed = f"{sink_class.__module__}.{sink_class.__qualname__} {keys!r}"
        if variables:
            self._fixed += f" {variables!r}"
        self._files = {key: ChangingFile(Path(path), _digest) for key, path in _named(keys, "_file")}

    def digest(self) -> str:
        """Return a text that changes with the configuration and does not reveal it."""
        contents = {key: _content_digest(file) for key, file in self._files.items()}
        text = f"{self._fixed} {contents!r}" if contents else self._fixed
        return _digest(text.encode("utf-8", "backslashreplace"))


def _named(keys: Mapping[str, object], ending: str) -> Iterator[tuple[str, str]]:
    return ((key, value) for key, value in keys.items() if key.endswith(ending) and isinstance(value, str))


def _content_digest(file: ChangingFile[str]) -> str:
    try:
        return file.value()
    except (OSError, ValueError):  # the sink reports it; a ValueError comes from an invalid path
        return _ABSENT


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
