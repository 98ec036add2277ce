"""Records to chat, mail and a hundred other services, through the Apprise library.

Each service is one Apprise URL (see the Apprise wiki), and an Apprise URL is a secret: write them into a file, one a
line, or into an environment variable, separated by white space.

    [[sinks]]
    type = "apprise"
    urls_file = "/etc/scheduled-events-bridge/apprise-urls"
    transitions = ["scheduled", "started", "completed", "canceled", "ended"]

The URLs are sent to side by side, and what each took is remembered: when one of three fails, only that one gets the
record again. The memory ends with the agent and holds the last 1,000 records of each URL; after a restart the others
may see a record twice. Several targets within one URL succeed or fail as one, so give targets that fail apart URLs of
their own; and a service that must not wait while another is down gets a table of its own.

Apprise says whether it worked and not why, so every failure is tried again; the reason shown is what Apprise logged,
without the words of the URL. An event whose end is known before its start was delivered is skipped whole. Apprise reads
the proxies of the environment, waits between two messages to one service as that service asks, and keeps the timeouts
`cto` and `rto` of a URL as far as `timeout_seconds` allows; a service that hangs beyond that gets nothing more until it
has let go. Apprise needs 24 MB, and is imported at the first record.
"""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

from bridge.sink import (
    URGENT_EVENT_TYPES,
    DeliveryFailed,
    DeliveryRejected,
    Secret,
    Sink,
    SinkConfig,
    Transition,
    TransitionRecord,
    masked,
)
from sinks.sentence import sentence

_INSTALL = (
    "The sink type 'apprise' needs the Python package 'apprise', which is not installed. It comes with the extra "
    "[apprise]: in the checkout, pip install '.[apprise]'."
)
_INVALID = "no URL that Apprise can use. Mend it, or take it out; see the Apprise wiki."
_NONE_YET = ("", "")
_MOST_REMEMBERED = 1_000
_MOST_REASON_CHARACTERS = 120
_SHORTEST_SECRET = 4
#: As most plugins log a refusal: nothing gets better before a person has changed something.
_NEEDS_A_PERSON = re.compile(r"error=(401|403|404|407)\b")
_DANGEROUS = frozenset({Transition.SCHEDULED, Transition.STARTED, Transition.UPDATED, Transition.TEST})
_WRONG = frozenset({Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})

#: What Apprise logs on behalf of one message, whichever thread it does that on.
_logged: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("apprise_logged", default=None)


class AppriseConfig(SinkConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type apprise."""

    urls_file: str | None = None
    """A file of Apprise URLs, one a line; read again when it changes."""
    urls_env: str | None = None
    """An environment variable with Apprise URLs, separated by white space."""

    def __post_init__(self) -> None:
        if (self.urls_file is None) == (self.urls_env is None):
            raise ValueError("set one of urls_file and urls_env: Apprise URLs hold secrets")
        if self.max_batch != 1:
            raise ValueError(f"max_batch is {self.max_batch}; Apprise sends one record at a time, so leave it out")
        # Said at the start, and not when the first Preempt is due.
        if importlib.util.find_spec("apprise") is None:
            raise ValueError(_INSTALL)


class AppriseSink(Sink):
    """Sends each record to every Apprise URL that has not taken it yet."""

    Config: ClassVar[type[SinkConfig]] = AppriseConfig
    config: AppriseConfig

    @classmethod
    def skips_what_is_over(cls, config: AppriseConfig) -> bool:
        """Return True: nobody is told of what is over."""
        del config
        return True

    def __init__(self, config: AppriseConfig) -> None:
        super().__init__(config)
        self._secret = Secret(key="urls", file=config.urls_file, env=config.urls_env)
        self._services: dict[str, _Service] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send the one record of *batch*; raise DeliveryFailed unless every URL took it, now or before."""
        if len(batch) != 1:
            raise DeliveryRejected(f"Apprise sends one record at a time, and got {len(batch)}.")
        record = batch[0]
        deadline = time.monotonic() + self.config.timeout_seconds
        services = self._current()
        with self._changed:
            for service in services:
                service.begin(record)
            self._changed.wait_for(
                lambda: self._is_closed or not any(service.is_sending for service in services),
                max(deadline - time.monotonic(), 0.0),
            )
            problems = [problem for service in services if (problem := service.problem(record.id)) is not None]
        if problems:
            raise DeliveryFailed(
                " ".join(problem.text for problem in problems),
                needs_attention=any(problem.is_for_a_person for problem in problems),
                uncertain=True,  # some service has it, or may have it all the same: Apprise cannot tell
            )

    def check(self) -> None:
        """Raise DeliveryFailed when a URL is none that Apprise knows; nothing is sent."""
        wrong = [str(service.number) for service in self._current() if not service.is_valid]
        if wrong:
            raise DeliveryFailed(f"URL {', '.join(wrong)}: {_INVALID}", needs_attention=True)

    def close(self) -> None:
        """Wait for no service any more; what is on its way ends by the timeouts of its URL."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _current(self) -> list[_Service]:
        """Return the services of the URLs as they stand now, in order; those that stayed keep their memory."""
        urls = list(dict.fromkeys(url for line in self._secret.values() for url in line.split()))
        apprise = _apprise()
        before, self._services = self._services, {}
        for number, url in enumerate(urls, 1):
            service = before.get(url)
            if service is None:
                target = _target(apprise, url, timeout_seconds=self.config.timeout_seconds / 2)
                service = _Service(target, url, changed=self._changed)
            service.number = number
            self._services[url] = service
        return list(self._services.values())


class _Problem(NamedTuple):
    text: str
    is_for_a_person: bool


class _Service:
    """One URL, what it took already, and the thread that is sending to it; used while holding *changed*."""

    def __init__(self, target: Any, url: str, *, changed: threading.Condition) -> None:
        self.number = 0
        self.is_valid = target is not None
        self.is_sending = False
        self._target = target
        self._schema = url.partition("://")[0]
        self._secrets = _words(url)
        self._changed = changed
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._last = _NONE_YET

    def begin(self, record: TransitionRecord) -> None:
        """Start to send *record*, unless it was taken, or a message before it still hangs."""
        if not self.is_valid or self.is_sending or record.id in self._taken:
            return
        self._last = (record.id, "no answer in time.")
        thread = threading.Thread(target=self._send, args=(record,), name=f"apprise:{self._schema}", daemon=True)
        thread.start()
        self.is_sending = True

    def problem(self, record_id: str) -> _Problem | None:
        """Return what keeps that record from being delivered; null when it was taken."""
        if record_id in self._taken:
            return None
        if not self.is_valid:
            return _Problem(f"URL {self.number}: {_INVALID}", is_for_a_person=True)
        last_id, reason = self._last
        said = reason if last_id == record_id else "the message before it still hangs."
        text = f"URL {self.number} ({self._schema}): {said}"
        return _Problem(text, is_for_a_person=_NEEDS_A_PERSON.search(said) is not None)

    def _send(self, record: TransitionRecord) -> None:
        lines: list[str] = []
        _logged.set(lines)
        is_taken = False
        try:
            is_taken = bool(
                self._target.notify(
                    body=sentence(record), title=_title(record), notify_type=_notify_type(record), body_format="text"
                )
            )
        except Exception as error:  # noqa: BLE001 - the top of a thread, and a hundred plugins under it
            lines.append(f"{type(error).__name__}: {error}")
        with self._changed:
            self.is_sending = False
            if is_taken:  # also when it comes after the deadline: the next try is told
                self._taken[record.id] = None
                while len(self._taken) > _MOST_REMEMBERED:
                    self._taken.popitem(last=False)
            else:
                self._last = (record.id, self._reason(lines))
            self._changed.notify_all()

    def _reason(self, lines: Sequence[str]) -> str:
        text = " ".join(lines[-1].split()) if lines else "Apprise says that it failed, and not why."
        return masked(text, self._secrets)[:_MOST_REASON_CHARACTERS]


def _target(apprise: Any, url: str, *, timeout_seconds: float) -> Any:
    """Return an Apprise object with *url* alone, its timeouts at most *timeout_seconds*; null when it is invalid."""
    plugin = apprise.Apprise.instantiate(url)
    if plugin is None:
        return None
    plugin.socket_connect_timeout = min(plugin.socket_connect_timeout, timeout_seconds)
    plugin.socket_read_timeout = min(plugin.socket_read_timeout, timeout_seconds)
    target = apprise.Apprise()
    target.add(plugin)
    return target


def _words(url: str) -> tuple[str, ...]:
    """Return every part of *url* that may be a secret, as it stands and unquoted: in Apprise, a host may be a token."""
    rest = url.partition("://")[2] or url
    texts = {rest, unquote(rest), rest.lower(), unquote(rest).lower()}
    words = {word for text in texts for word in re.split(r"[/:@?&=#,;]+", text)}
    return (url, *texts, *(word for word in words if len(word) >= _SHORTEST_SECRET))


def _title(record: TransitionRecord) -> str:
    event = record.event
    what = "agent" if event is None else event.event_type or "event"
    where = record.vm.name or "this VM"
    return f"{what} {record.transition.value.replace('_', ' ')}: {where}"


def _notify_type(record: TransitionRecord) -> str:
    """Return Apprise's info, success, warning or failure."""
    if record.transition in _WRONG:
        return "warning"
    if record.transition is Transition.COMPLETED:
        return "success"
    if record.transition not in _DANGEROUS:
        return "info"
    event = record.event
    return "failure" if event is not None and event.event_type in URGENT_EVENT_TYPES else "warning"


class _Catcher(logging.Handler):
    """Keeps what Apprise logs for the message that it logs it for."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = _logged.get()
        if lines is not None:
            lines.append(record.getMessage())


def _apprise() -> Any:
    """Return the Apprise library, its log caught: its lines name hosts, which may be tokens."""
    log = logging.getLogger("apprise")
    if not any(isinstance(handler, _Catcher) for handler in log.handlers):
        log.addHandler(_Catcher())
        log.setLevel(logging.WARNING)
        log.propagate = False
    try:
        return importlib.import_module("apprise")
    except ImportError as error:
        raise DeliveryFailed(_INSTALL, needs_attention=True) from error
