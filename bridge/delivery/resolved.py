"""The digest of what a sink is configured with, as far as that decides how its destination takes requests.

That is its table, the content of each file and variable that the table names under a key that ends in ``_file`` or
``_env`` (the rule for every sink's keys), and what else the sink takes from its surroundings (`Sink.surroundings`). A
URL in a file is as much the endpoint as one in the table. Files are read as they are now, each time: whoever calls does
it where a file system that hangs does no harm.
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
    """What the sink *sink_class* with *config* resolves to; shows nothing of it but a digest."""

    def __init__(self, sink_class: type[Sink], config: SinkConfig, *, environ: Mapping[str, str] = os.environ) -> None:
        keys = msgspec.structs.asdict(config)
        surroundings = tuple(sink_class.surroundings(config))
        variables = {key: environ.get(name) for key, name in _named(keys, "_env")}
        self._fixed = f"{sink_class.__module__}.{sink_class.__qualname__} {keys!r}"
        if surroundings or variables:
            self._fixed += f" {surroundings!r} {variables!r}"
        self._files = {key: ChangingFile(Path(path), _digest) for key, path in _named(keys, "_file")}

    def digest(self) -> str:
        """Return a text that changes with what is configured, and shows nothing of it."""
        contents = {key: _content_digest(file) for key, file in self._files.items()}
        text = f"{self._fixed} {contents!r}" if contents else self._fixed
        return _digest(text.encode("utf-8", "backslashreplace"))


def _named(keys: Mapping[str, object], ending: str) -> Iterator[tuple[str, str]]:
    return ((key, value) for key, value in keys.items() if key.endswith(ending) and isinstance(value, str))


def _content_digest(file: ChangingFile[str]) -> str:
    try:
        return file.value()
    except (OSError, ValueError):  # the sink says so where it needs it; a ValueError is of a path that is none
        return _ABSENT


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
