"""A webhook that keeps each request, and a sender of notifications with a clock and agents for tests."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fleet_records import NOW

from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.metrics import PortalMetrics
from bridge.portal.notify_settings import Kind, NotifySettings
from bridge.portal.notifying import NotificationSender
from bridge.portal.settings import read
from bridge.portal.site import Site
from bridge.portal.store.database import Store, StoreThreads
from bridge.testing import ManualClock
from bridge.testing.http_contract import Answer, HttpPeer
from bridge.testing.simulator.imds_api import Request

#: Five minutes before the NotBefore of the records of `fleet_records`.
SOON = NOW + timedelta(minutes=10)
ORIGIN = "https://portal.example.net"


class WebhookReceiver:
    """Answers each POST with a status of *statuses*, and with 204 after the last of them; a context manager."""

    def __init__(self, *statuses: int, before_answer: Callable[[], object] = lambda: None) -> None:
        self.received: queue.Queue[tuple[dict[str, str], bytes]] = queue.Queue()
        self._statuses = list(statuses)
        self._before_answer = before_answer
        self._peer = HttpPeer()
        self._peer.reply(self._answer)
        self.url = f"http://{self._peer.address.authority}/hook"

    def _answer(self, request: Request) -> Answer:
        self.received.put((dict(request.headers), request.body))
        self._before_answer()
        return Answer(status=self._statuses.pop(0) if self._statuses else 204, headers={"Location": self.url})

    def __enter__(self) -> WebhookReceiver:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._peer.close()

    def bodies(self) -> list[Any]:
        """Return the JSON of the requests since the last call."""
        found = []
        while not self.received.empty():
            found.append(json.loads(self.received.get()[1]))
        return found

    def types(self) -> list[str]:
        """Return the type of each notification since the last call, in the format `standard`."""
        return [each["type"].removeprefix("event.") for each in self.bodies()]


class SenderKit:
    """The senders of processes that share a store, a clock, and agents."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock(SOON)
        self.agents = ConnectedAgents(self.clock.clock)
        self._metrics = PortalMetrics()

    def sender(self, url: str, *kinds: Kind, store: Store | None = None, **settings: Any) -> NotificationSender:
        """Return a sender to *url* for *kinds*, or for all kinds."""
        table = {"agents": {"token_env": "T"}, "people": {"origin": ORIGIN}}
        threads = StoreThreads(store or self.store)
        site = Site(read(table), store=threads, clock=self.clock.clock)
        site.connected_agents, site.metrics = self.agents, self._metrics
        whole = {"name": "ops", "url": url or None, "kinds": kinds or tuple(Kind), **settings}
        return NotificationSender(NotifySettings(**whole), site)

    def counted(self, result: str) -> float:
        """Return the number of requests with *result*."""
        return float(self._metrics.notifications.labels("ops", result)._value.get())
