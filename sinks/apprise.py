"""Implements the `apprise` sink, which sends records to chat, email, and other services.

Each Apprise URL names one service and usually contains a secret. The URLs are therefore stored in a file or in an
environment variable, not in the configuration. If a service fails, the agent sends the record again, but only to the
services that have not accepted it. The sink keeps this state in memory, so a restart can cause duplicates.

Every failure is retried, because Apprise does not report the reasons for failures consistently. Error messages contain
the log lines of Apprise, without any parts of URLs that could be secret.

Apprise uses 24 MB of memory, so the sink imports Apprise only when it sends the first record.
"""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar
from urllib.parse import unquote

from bridge.sink import (
    DeliveryFailed,
    Secret,
    SinkConfig,
    TransitionRecord,
    escaped,
    how_to_install,
    masked,
)
from sinks.blocking import BlockingSink
from sinks.sentence import sentence
from sinks.severity import look_of

_INVALID = "Apprise cannot use this URL. Correct or remove the URL. The Apprise wiki lists the valid forms."
_MOST_REASON_CHARACTERS = 256
_MOST_REMEMBERED = 1_000
_SHORTEST_SECRET = 4
_LONGEST_THROTTLE_SECONDS = 1.0
#: Most plugins of Apprise log the status of a rejected request in this form.
_NEEDS_A_PERSON = re.compile(r"error=(401|403|404|407)\b")
#: Apprise chooses the icon and the color of a message by this type.
_NOTIFY_TYPES = {"attention": "failure", "warning": "warning", "good": "success"}

#: Apprise's log lines for one message.
_logged: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("apprise_logged", default=None)


class AppriseConfig(SinkConfig, frozen=True, kw_only=True):
    """The settings of the sink type `apprise`."""

    urls_file: str | None = None
    """A file with Apprise URLs, one per line. The agent rereads the file when it changes."""
    urls_env: str | None = None
    """An environment variable with Apprise URLs, separated by spaces."""

    def __post_init__(self) -> None:
        if (self.urls_file is None) == (self.urls_env is None):
            raise ValueError("Set urls_file or urls_env, because Apprise URLs contain secrets.")
        if self.max_batch != 1:
            raise ValueError(f"max_batch is {self.max_batch}, but Apprise sends one record at a time.")
        if importlib.util.find_spec("apprise") is None:
            raise ValueError(
                "The sink type 'apprise' needs the Python package 'apprise', which is not installed. "
                f"{how_to_install('apprise')}."
            )


class AppriseSink(BlockingSink):
    """Sends each record to every Apprise URL of the table."""

    Config: ClassVar[type[SinkConfig]] = AppriseConfig
    config: AppriseConfig

    @classmethod
    def current_state_only(cls, config: AppriseConfig) -> bool:
        """Return True, because people need only the current state of an event."""
        del config
        return True

    def __init__(self, config: AppriseConfig) -> None:
        super().__init__(config, target="Apprise")
        self._secret = Secret(key="urls", file=config.urls_file, env=config.urls_env)
        self._urls: tuple[str, ...] = ()
        self._services: dict[str, Any] = {}
        self._accepted: dict[str, set[str]] = {}
        """For each recent record, the URLs that accepted it. A retry skips these URLs."""

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send the record. Raise DeliveryFailed unless every service accepted the record."""
        (record,) = batch
        self.run(partial(self._notify, self._current(), record))

    def _notify(self, services: dict[str, Any], record: TransitionRecord) -> None:
        accepted = self._accepted.setdefault(record.id, set())
        if len(self._accepted) > _MOST_REMEMBERED:
            del self._accepted[next(iter(self._accepted))]
        problems = []
        for url, service in services.items():
            problem = None if url in accepted else _problem(service, record)
            if problem is None:
                accepted.add(url)
            else:
                problems.append(problem)
        if problems:
            shown = masked(" ".join(problems), _words(self._urls))[:_MOST_REASON_CHARACTERS]
            raise DeliveryFailed(
                f"Apprise: {shown}",
                needs_attention=_NEEDS_A_PERSON.search(shown) is not None,
            )

    @classmethod
    def shown_by_check(cls, config: AppriseConfig) -> str:
        """Return the result of `check`, which does not contact the services."""
        return f"Apprise can use the URLs. To test the services, send a message with `send-test {config.name}`."

    @classmethod
    def check_warnings(cls, config: AppriseConfig) -> Sequence[str]:
        """Return a warning for each URL to which Apprise sends less than one message per second."""
        services: dict[str, Any] = {}
        with suppress(Exception):  # `check` reports the error
            services = cls(config)._current()  # noqa: SLF001  # an instance of this class
        return [
            f"Apprise waits {plugin.request_rate_per_sec:g} s between two messages to URL {number} "
            f"({plugin.service_name}), so the messages of several records arrive late."
            for number, service in enumerate(services.values(), 1)
            for plugin in service
            if plugin.request_rate_per_sec > _LONGEST_THROTTLE_SECONDS
        ]

    def check(self) -> None:
        """Raise DeliveryFailed if a URL is not valid for Apprise. The check sends nothing."""
        self._current()

    def _current(self) -> dict[str, Any]:
        urls = tuple(dict.fromkeys(url for line in self._secret.values() for url in line.split()))
        if urls != self._urls:
            self._services = _services(urls, timeout_seconds=self.config.timeout_seconds / 2)
            self._urls = urls
        return self._services


def _services(urls: Sequence[str], *, timeout_seconds: float) -> dict[str, Any]:
    """Return one Apprise object per URL, so that a failing service does not affect others."""
    apprise = _apprise()
    # async_mode uses threads that would delay the end of the process.
    asset = apprise.AppriseAsset(async_mode=False)
    plugins = [apprise.Apprise.instantiate(url, asset=asset) for url in urls]
    wrong = [str(number) for number, plugin in enumerate(plugins, 1) if plugin is None]
    if wrong:
        raise DeliveryFailed(f"URL {', '.join(wrong)}: {_INVALID}", needs_attention=True)
    services = {}
    for url, plugin in zip(urls, plugins, strict=True):
        plugin.socket_connect_timeout = min(plugin.socket_connect_timeout, timeout_seconds)
        plugin.socket_read_timeout = min(plugin.socket_read_timeout, timeout_seconds)
        services[url] = apprise.Apprise(asset=asset)
        services[url].add(plugin)
    return services


def _problem(service: Any, record: TransitionRecord) -> str | None:
    """Send *record*. Return an error message, or None if the service accepted the record."""
    lines: list[str] = []
    _logged.set(lines)
    try:
        is_taken = service.notify(
            body=sentence(record),
            title=_title(record),
            notify_type=_NOTIFY_TYPES.get(look_of(record).card_color, "info"),
            body_format="text",
        )
    except Exception as error:  # noqa: BLE001  # a plugin can raise any exception
        return f"{type(error).__name__}: {error}"
    return None if is_taken else " ".join(" ".join(lines).split()) or "The send failed without a reason."


def _words(urls: Sequence[str]) -> set[str]:
    texts = set()
    for url in urls:
        rest = url.partition("://")[2] or url
        texts |= {url, rest, unquote(rest), rest.lower(), unquote(rest).lower()}
    words = {word for text in texts for word in re.split(r"[/:@?&=#,;]+", text)}
    return texts | {word for word in words if len(word) >= _SHORTEST_SECRET}


def _title(record: TransitionRecord) -> str:
    event = record.event
    what = "agent" if event is None else event.event_type or "event"
    where = record.vm.name or "this VM"
    return escaped(f"{what} {record.transition.value.replace('_', ' ')}: {where}")


class _Catcher(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines = _logged.get()
        if lines is not None:
            lines.append(record.getMessage())


def _apprise() -> Any:
    log = logging.getLogger("apprise")
    if not any(isinstance(handler, _Catcher) for handler in log.handlers):
        log.addHandler(_Catcher())
        log.setLevel(logging.WARNING)
        log.propagate = False
    return importlib.import_module("apprise")
