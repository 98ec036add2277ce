"""Groups the parts of the portal that serve people and programs."""

from __future__ import annotations

import msgspec

from bridge.clock import Clock, format_time
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.deciding import VerdictService
from bridge.portal.login import LoginPages
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.store.database import StoreThreads
from bridge.portal.users import Users


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the portal that the pages and the JSON API use."""

    users: Users
    verdict_service: VerdictService
    store: StoreThreads
    connected_agents: ConnectedAgents
    live: LiveUpdates
    login: LoginPages
    clock: Clock
    kid: str | None
    """The name of the portal's signing key."""

    def now(self) -> str:
        """Return the time for the database."""
        return format_time(self.clock.now())
