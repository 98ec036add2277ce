"""No trouble at all: Azure's plans, which are told and wake nobody, and a day of normal work."""

from __future__ import annotations

from collections.abc import Iterator

from alert_stories.live import LiveAgent
from alert_stories.stage import Stage
from alert_stories.story import Stories
from alert_stories.timeline import Phase
from alert_stories.unit_test import Firing, Scene
from portal_stub import PortalStub

from bridge.testing import Fault

STORIES = Stories()


@STORIES.tell("Azure announces an event, starts it late and ends it", severities="page|ticket|info")
def event_late(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    event_id = stage.announce("Reboot", notice_seconds=600.0)
    agent.wait_for(lambda scrape: scrape.of("next_not_before_seconds", event_type="Reboot"))
    ahead = agent.phase(9)
    stage.azure.world.start(event_id)
    agent.wait_for(lambda scrape: scrape.of("active_events", event_type="Reboot", event_status="Started"))
    started = agent.phase(9)
    stage.azure.world.complete(event_id)
    agent.wait_for(lambda scrape: not scrape.sum("active_events"))
    return [
        Scene(before),
        Scene(ahead, (_ahead("Reboot"),)),
        Scene(Phase(8, ahead.scrapes), (_ahead("Reboot"),)),  # NotBefore passes, and the event still stands
        Scene(Phase(12, ahead.scrapes), (_azure("Overdue", "Reboot"),)),
        Scene(started, (_started("Reboot"),)),
        Scene(agent.phase(15)),
    ]


@STORIES.tell("A day of normal work", severities="page|ticket|info")
def day(stage: Stage) -> list[Scene]:
    portal = _portal(stage)
    rule = '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'
    tables = stage.webhook() + rule + portal.toml(wait_seconds=1)
    agent = stage.watching(tables)
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
    scenes = [
        Scene(agent.phase(180)),
        *_moved_to_another_host(stage, agent),
        *_frozen_and_called_off(stage, agent),
        *_peers_away_for_minutes(stage, agent, portal),
        *_configured_and_upgraded(agent, tables),
    ]
    assert agent.scrape().of("sink_pending_records", sink="sre") == 0
    return scenes


def _moved_to_another_host(stage: Stage, agent: LiveAgent) -> Iterator[Scene]:
    event_id = stage.announce("Redeploy", notice_seconds=600.0)
    _wait_for_delivered(agent, 1)
    yield Scene(agent.phase(9), (_ahead("Redeploy"),))
    stage.azure.world.start(event_id)
    _wait_for_delivered(agent, 2)
    agent.stop()
    yield Scene(Phase(12))
    agent.watch()
    agent.wait_for(lambda scrape: scrape.of("active_events", event_type="Redeploy", event_status="Started"))
    yield Scene(agent.phase(6), (_started("Redeploy"),))
    stage.azure.world.complete(event_id)
    _wait_for_delivered(agent, 3)
    yield Scene(agent.phase(240))


def _frozen_and_called_off(stage: Stage, agent: LiveAgent) -> Iterator[Scene]:
    """Have a Freeze that a rule approves, and a Terminate that is called off while the sink is away for minutes."""
    stage.announce("Freeze", duration_seconds=5, impact_seconds=2.0)
    agent.wait_for(lambda scrape: scrape.of("approvals_total", source="rule:freeze", result="accepted"))
    _wait_for_delivered(agent, 7)
    yield Scene(agent.phase(200))
    stage.peer.refuse_for_now()
    event_id = stage.announce("Terminate")
    agent.wait_for(lambda scrape: scrape.sum("sink_retries_total"))
    yield Scene(agent.phase(4), (_ahead("Terminate"),))
    stage.azure.world.cancel(event_id)
    stage.peer.accept()
    _wait_for_delivered(agent, 9)
    yield Scene(agent.phase(150))


def _peers_away_for_minutes(stage: Stage, agent: LiveAgent, portal: PortalStub) -> Iterator[Scene]:
    stage.azure.world.set_fault(Fault(kind="status", status=500))
    agent.wait_for(lambda scrape: scrape.of("polls_total", result="status_500"))
    yield Scene(agent.phase(3))
    stage.azure.world.clear_faults()
    portal.down()
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up") == 0)
    yield Scene(agent.phase(5))
    portal.up()
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
    yield Scene(agent.phase(100))


def _configured_and_upgraded(agent: LiveAgent, tables: str) -> Iterator[Scene]:
    agent.configure(tables, top='labels = { team = "payments" }')
    agent.signal("SIGHUP")
    agent.wait(lambda: "The configuration was reloaded." in agent.log)
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
    yield Scene(agent.phase(180))
    agent.stop()
    agent.watch()
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
    yield Scene(Phase(1))
    yield Scene(agent.phase(350))


def _wait_for_delivered(agent: LiveAgent, count: int) -> None:
    agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre") == count)


def _azure(what: str, event_type: str, *more: tuple[str, str]) -> Firing:
    return Firing(f"AzureScheduledEvent{what}", "info", labels=(("event_type", event_type), *more), is_each=True)


def _ahead(event_type: str) -> Firing:
    return _azure("Ahead", event_type)


def _started(event_type: str) -> Firing:
    return _azure("Started", event_type, ("event_status", "Started"))


def _portal(stage: Stage, name: str = "portal") -> PortalStub:
    portal = PortalStub(stage.directory / name)
    stage.close_with(portal.close)
    return portal
