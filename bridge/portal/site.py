"""Bundles the parts of the portal that HTTP routes and periodic tasks share."""

from __future__ import annotations

from bridge.approval.signing import DecisionSigner
from bridge.clock import Clock, format_time
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.login import LoginPages
from bridge.portal.metrics import PortalMetrics
from bridge.portal.pending_decisions import PendingDecisions
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.settings import PortalSettings
from bridge.portal.store.database import StoreThreads
from bridge.portal.users import Users


class Site:
    """The parts and the settings of the portal that several modules share."""

    def __init__(self, settings: PortalSettings, *, store: StoreThreads, clock: Clock) -> None:
        self.store = store
        self.metrics = PortalMetrics()
        self.clock = clock
        self.required = settings.people.required_approvals
        """The number of people who must approve an event."""
        self.origin = settings.people.origin or ""
        self.key: DecisionSigner | None = None
        """The key that signs the decisions of people."""
        if signing := settings.signing:
            self.key = DecisionSigner(signing.private_key_file, kid=signing.kid, approver=signing.approver)
        self.users = Users(settings.people, store=store, clock=clock)
        self.connected_agents = ConnectedAgents(clock)
        self.pending_decisions = PendingDecisions(store, clock=clock)
        self.live = LiveUpdates(store=store, users=self.users, connected_agents=self.connected_agents, clock=clock)
        self.login = LoginPages(users=self.users, live=self.live, clock=clock)

    @property
    def kid(self) -> str | None:
        """Return the name of the key."""
        return None if self.key is None else self.key.kid

    def now(self) -> str:
        """Return the time for the database."""
        return format_time(self.clock.now())
