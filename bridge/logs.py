"""Writes structured logs to standard error as JSON, text, or for the journal.

INFO messages report a change of state. WARNING means that an operation failed and will be retried. ERROR means that
someone must intervene.

Logging never blocks the agent or raises an exception. A separate thread writes the log lines from a bounded queue, so
that a slow log collector cannot delay a poll. If the queue is full, the agent drops log lines and later logs how many
it dropped.

The fields in ``extra`` become keys in JSON logs and ``key=value`` pairs in text logs, which omit fields without a
value. Text logs escape control characters so that a message from a remote peer cannot forge log lines or control the
terminal.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Hashable
from datetime import datetime, timezone
from json import dumps
from typing import Any, TextIO

from bridge.clock import REAL_CLOCK, Clock, format_time
from bridge.text import escaped

#: These libraries log their retries, but the bridge already logs each failure once.
_QUIETED = {
    "urllib3": logging.ERROR,
    "azure": logging.ERROR,
    "opentelemetry": logging.ERROR,
    "asyncio": logging.WARNING,
}

_MOST_QUEUED = 1_000
#: Both timeouts apply at exit, one after the other.
_FLUSH_SECONDS = 0.3
_CLOSE_SECONDS = 0.1
_REMINDER_SECONDS = 3_600.0
_FULL_SECONDS = 0.05

#: The attributes of every LogRecord. All other attributes come from ``extra``.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_COLOURS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def configure(*, form: str = "auto", level: int | str = logging.INFO, stream: TextIO | None = None) -> None:
    """From now on, write all log lines to *stream* (standard error by default).

    *form* is ``json``, ``text``, ``journal``, or ``auto``. The form ``auto`` means ``text`` on a terminal, ``journal``
    if the systemd journal reads *stream*, and ``json`` otherwise.
    """
    # Otherwise, the logging library prints a traceback if it cannot write to the stream.
    logging.raiseExceptions = False
    # Do not collect the caller, the thread, and the process, which no format shows (logging HOWTO, "Optimization").
    logging._srcfile = None  # noqa: SLF001  # the documented way
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.captureWarnings(capture=True)
    stream = stream or sys.stderr
    is_terminal = _is_terminal(stream)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, QueuedHandler)]:
        root.removeHandler(old)
        old.close()
    handler = QueuedHandler(stream)
    if form == "auto":
        form = "text" if is_terminal else "journal" if is_journal(stream) else "json"
    if form == "json":
        handler.setFormatter(JsonFormatter())
    elif form == "journal":
        handler.setFormatter(JournalFormatter())
    else:
        handler.setFormatter(LineFormatter(colour=is_terminal and _wants_colour()))
    root.addHandler(handler)
    root.setLevel(level)
    for name, lowest in _QUIETED.items():
        logging.getLogger(name).setLevel(max(lowest, root.level))


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def is_journal(stream: TextIO | None) -> bool:
    """Return whether the journal reads *stream*, based on $JOURNAL_STREAM (systemd.exec)."""
    try:
        status = os.fstat(stream.fileno()) if stream is not None else None
    except (OSError, ValueError, AttributeError):
        return False
    return status is not None and os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _wants_colour() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return os.name != "nt" or bool(os.environ.get("WT_SESSION") or os.environ.get("TERM"))


class QueuedHandler(logging.Handler):
    """A logging handler that never blocks the caller. A separate thread writes the lines."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_QUEUED)
        self._dropped = 0
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add the line of *record* to the queue. If the queue is full, count a dropped line."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001  # logging must not stop the caller
            self.handleError(record)

    def flush(self) -> None:
        """Wait until the queued lines are written, for at most 0.3 s."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and time.monotonic() < deadline and self._writer.is_alive():
                self._lines.all_tasks_done.wait(deadline - time.monotonic())

    def close(self) -> None:
        """Wait up to 0.1 s for the writer thread to write the queued lines, and then stop it."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            pass
        else:
            self._writer.join(_CLOSE_SECONDS)
        self._closed.set()
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None and not self._closed.is_set():
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line += f"\n{self.format(_dropped_record(dropped))}"
            self._write(f"{line}\n")
            self._lines.task_done()

    def _write(self, line: str) -> None:
        try:
            descriptor = self._descriptor()
            if descriptor is not None:
                self._write_bytes(descriptor, line.encode(errors="backslashreplace"))
            elif self._stream is not None:
                self._stream.write(line)
                self._stream.flush()
        except (OSError, ValueError):
            # The stream is closed or the disk is full. The line is lost, because no other destination exists.
            pass

    def _descriptor(self) -> int | None:
        # A thread that is blocked inside the buffer of the stream would abort the interpreter at exit.
        if self._stream is None or (os.name == "nt" and self._stream.isatty()):
            return None
        try:
            return self._stream.fileno()
        except (OSError, AttributeError):
            return None

    def _write_bytes(self, descriptor: int, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(descriptor, line) :]
            except BlockingIOError:
                if self._closed.wait(_FULL_SECONDS):
                    return


def _dropped_record(count: int) -> logging.LogRecord:
    text = f"{count} log lines were dropped because standard error was not read in time"
    return logging.makeLogRecord(
        {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text, "dropped": count}
    )


class _Trouble:
    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0
        self.logged: dict[tuple[int, str], _Logged] = {}
        """The last log line of each level and kind."""


class _Logged:
    def __init__(self, at: float) -> None:
        self.at = at
        self.repeats = 0


class ThrottledLog:
    """Logs a repeated failure once, then hourly with a count, until recovery.

    *key* identifies the failing component, such as a sink or the poll. Failures with the same key and *kind*, such as
    ``timeout`` or ``status_503``, count as repetitions. The kind defaults to the log message, so pass a kind if the
    message contains text from a peer, which can differ each time.
    """

    def __init__(self, logger: logging.Logger, *, clock: Clock = REAL_CLOCK) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._troubles: dict[Hashable, _Trouble] = {}

    def problem(
        self,
        key: Hashable,
        level: int,
        message: str,
        *,
        kind: str | None = None,
        exc_info: BaseException | None = None,
        **fields: Any,
    ) -> None:
        """Log *message* at the first failure of *key* with this *kind*, then only count failures."""
        now = self._clock.monotonic()
        with self._lock:
            trouble = self._troubles.setdefault(key, _Trouble(now))
            trouble.count += 1
            which = level, message if kind is None else kind
            last = trouble.logged.get(which)
            if last is not None and now - last.at < _REMINDER_SECONDS:
                last.repeats += 1
                return
            trouble.logged[which] = _Logged(now)
        if last is not None and last.repeats:
            message = f"{message} ({last.repeats} more times since the last report)"
            fields["repeats"] = last.repeats
        self._logger.log(level, "%s", message, exc_info=exc_info, extra=fields)

    def recovered(self, key: Hashable, message: str, **fields: Any) -> None:
        """If *key* was failing, log *message* with the number of failures and their duration."""
        with self._lock:
            trouble = self._troubles.pop(key, None)
        if trouble is None:
            return
        lasted = round(self._clock.monotonic() - trouble.since, 1)
        self._logger.info("%s", message, extra={**fields, "failures": trouble.count, "lasted_seconds": lasted})


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* as ASCII JSON."""
        line: dict[str, Any] = {
            "time": format_time(datetime.fromtimestamp(record.created, timezone.utc)),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _extra_fields(record).items():
            line[f"{key}_" if key in line else key] = value
        if record.exc_info and record.exc_info[0]:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return _json(line, separators=(",", ":"))


class LineFormatter(logging.Formatter):
    """Formats a log record as one short line for a terminal."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the time, the level, the message, and the fields."""
        clock = datetime.fromtimestamp(record.created, timezone.utc).strftime("%H:%M:%SZ")
        level = f"{record.levelname:<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        first, *others = _lines(self, record)
        return "\n".join([f"{clock} {level} {first}", *others])


class JournalFormatter(logging.Formatter):
    """Formats a log record without its time, because the systemd journal adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the priority, the message, and the fields."""
        priority = f"<{_PRIORITIES.get(record.levelname, 5)}>"
        return "\n".join(priority + line for line in _lines(self, record))


def _lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    given = _extra_fields(record).items()
    fields = "".join(f" {key}={_shown(value)}" for key, value in given if value not in (None, "", [], (), {}))
    lines = [escaped(record.getMessage() + fields)]
    if record.exc_info and record.exc_info[0]:
        lines += ["  " + escaped(part) for part in formatter.formatException(record.exc_info).split("\n")]
    return lines


def _shown(value: object) -> str:
    """Return *value* as JSON, without list brackets and without quotes for one word."""
    if isinstance(value, list | tuple | set | frozenset):
        return ",".join(map(_shown, value))
    is_word = isinstance(value, str) and " " not in value and bool(value)
    return str(value) if is_word else _json(value, ensure_ascii=False)


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}


def _json(value: object, **options: Any) -> str:
    """Return *value* as JSON. Fields that JSON does not support become text."""
    try:
        return dumps(value, default=_plain, allow_nan=False, **options)
    except (TypeError, ValueError, RecursionError):  # for example NaN, a cycle, or a key that is not text
        plain = {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else str(value)
        return dumps(plain, **options)


def _plain(value: object) -> object:
    """Return a set as a list, and any other value that JSON does not support as text."""
    return list(value) if isinstance(value, set | frozenset) else str(value)
