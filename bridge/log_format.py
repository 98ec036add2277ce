"""One log record as one line: an ASCII JSON object for a collector, or a short text for a person.

Whatever a caller gives as ``extra`` must come out as a line: a value that JSON cannot say becomes its text, and NaN
is text too. For a person control characters are escaped, or a remote message could forge lines and paint the terminal.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from json import dumps
from typing import Any

from bridge.clock import format_time

#: What every LogRecord has of itself; the rest was given as ``extra``.
STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_COLOURS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
_DEEPEST = 6


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the extra fields, and exception when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* as ASCII JSON."""
        line: dict[str, Any] = {
            "time": format_time(datetime.fromtimestamp(record.created, timezone.utc)),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in extra_fields(record).items():
            line[f"{key}_" if key in line else key] = _plain(value)
        if record.exc_info and record.exc_info[0]:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return dumps(line, separators=(",", ":"))


class LineFormatter(logging.Formatter):
    """Short lines for a person."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, message and fields; an exception follows on lines of its own."""
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = f"{record.levelname:<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        fields = "".join(f" {key}={_plain(value)}" for key, value in extra_fields(record).items())
        line = f"{clock} {level} {_escaped(record.getMessage() + fields)}"
        if record.exc_info and record.exc_info[0]:
            trace = self.formatException(record.exc_info).split("\n")
            line = "\n".join([line, *("  " + _escaped(part) for part in trace)])
        return line


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what was given as ``extra`` with *record*."""
    return {key: value for key, value in vars(record).items() if key not in STANDARD_FIELDS}


def _plain(value: object, depth: int = 0) -> Any:
    """Return *value* as what JSON can say; anything unknown as its text."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping) and depth < _DEEPEST:
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth < _DEEPEST:
        return [_plain(item, depth + 1) for item in value]
    return str(value)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)
