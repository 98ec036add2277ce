"""The ops portal, its decisions and the rules in trouble."""

from __future__ import annotations

import json

from alert_stories.stage import Stage
from alert_stories.story import Stories, bridge
from alert_stories.timeline import Phase
from alert_stories.unit_test import Scene
from portal_stub import PortalStub

from bridge.events.record import decode_record

STORIES = Stories()

_DAY_SECONDS = 86_400.0


@STORIES.tell("The ops portal is down", agents=(1, 3))
def portal_down(stage: Stage) -> list[Scene]:
    portal = _portal(stage)
    agent = stage.watching(stage.webhook() + portal.toml(wait_seconds=1))
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
    before = agent.phase(15)
    portal.down()
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up") == 0)
    during = agent.phase(16)
    portal.up()
    agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
    all_of_them = (bridge("PortalDown", severity="page"),)
    return [
        Scene(before),
        Scene(Phase(9, during.scrapes)),
        Scene(Phase(5, during.scrapes), many=all_of_them),
        Scene(during, (bridge("PortalUnreachable"),), all_of_them),
        Scene(agent.phase(15)),
    ]


@STORIES.tell("Azure takes an approval and does not begin")
def approved_but_waiting(stage: Stage) -> list[Scene]:
    rule = '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'
    agent = stage.watching(stage.webhook() + rule)
    before = agent.phase(15)
    event_id = stage.announce(notice_seconds=_DAY_SECONDS, on_approval="wait")
    agent.wait_for(lambda scrape: scrape.of("approved_waiting_seconds"))
    during = agent.phase(45)
    stage.azure.world.start(event_id)
    agent.wait_for(lambda scrape: scrape.of("approved_waiting_seconds") == 0)
    return [
        Scene(before),
        Scene(during),
        Scene(Phase(30, during.scrapes), (bridge("ApprovedButWaiting", each=True),)),
        Scene(agent.phase(15)),
    ]


@STORIES.tell("The command of an approval rule fails")
def approval_failing(stage: Stage) -> list[Scene]:
    rule = (
        '[[approval.rules]]\nname = "drain"\nevent_types = ["Freeze"]\naction = "approve"\n'
        'resources = "only_me"\ncommand = ["false"]\n'
    )
    agent = stage.watching(stage.webhook() + rule)
    before = agent.phase(15)
    stage.announce(notice_seconds=_DAY_SECONDS)
    labels = (("source", "rule:drain"), ("result", "command_failed"))
    agent.wait_for(lambda scrape: scrape.of("approvals_total", **dict(labels)))
    firing = (bridge("ApprovalsFailing", labels=labels),)
    return [Scene(before), Scene(agent.phase(15), firing), Scene(agent.phase(60))]


@STORIES.tell("Decisions come that nobody may have signed")
def decision_forged(stage: Stage) -> list[Scene]:
    portal, stranger = _portal(stage), _portal(stage, "stranger")
    agent = stage.watching(stage.webhook() + portal.toml(wait_seconds=1))
    before = agent.phase(15)
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre"))
    event = decode_record(json.dumps(json.loads(stage.peer.requests[0].body)["data"])).event
    assert event is not None
    # The same kid, and another key.
    portal.put(stage.vm_id, stranger.decide(event, vm_id=stage.vm_id))
    labels = (("source", "portal"), ("result", "forged"))
    agent.wait_for(lambda scrape: scrape.of("approvals_total", **dict(labels)))
    firing = (bridge("ForgedDecision", labels=labels),)
    return [Scene(before), Scene(agent.phase(15), firing), Scene(agent.phase(60))]


def _portal(stage: Stage, name: str = "portal") -> PortalStub:
    portal = PortalStub(stage.directory / name)
    stage.close_with(portal.close)
    return portal
