"""Groups the parts of the portal that serve people and programs."""

from __future__ import annotations

import msgspec

from bridge.approval.signing import DecisionSigner
from bridge.clock import Clock, format_time
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.login import LoginPages
from bridge.portal.metrics import PortalMetrics
from bridge.portal.pending_decisions import PendingDecisions
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.store.database import StoreThreads
from bridge.portal.users import Users


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the portal that the pages and the JSON API use."""

    users: Users
    store: StoreThreads
    pending_decisions: PendingDecisions
    connected_agents: ConnectedAgents
    live: LiveUpdates
    login: LoginPages
    metrics: PortalMetrics
    clock: Clock
    key: DecisionSigner | None
    """The key that signs the decisions of people."""
    required: int
    """The number of people who must approve an event."""

    @property
    def kid(self) -> str | None:
        """Return the name of the key."""
        return None if self.key is None else self.key.kid

    def now(self) -> str:
        """Return the time for the database."""
        return format_time(self.clock.now())
