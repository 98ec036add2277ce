"""The ops portal, its decisions and the rules in trouble."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.events.record import decode_record
from bridge.testing.portal import PortalStub

if TYPE_CHECKING:
    from tests.deploy.metrics.stage import Stage
    from tests.deploy.metrics.story import Stories
    from tests.deploy.metrics.timeline import Phase
    from tests.deploy.metrics.unit_test import Firing, Scene

# By path: the directories of tests are no packages.
_HERE = Path(__file__).parent
_STORY = runpy.run_path(str(_HERE / "story.py"))
STORIES: Stories = _STORY["Stories"]()
_bridge: Callable[..., Firing] = _STORY["bridge"]
_Scene: type[Scene] = _STORY["Scene"]
_Phase: type[Phase] = _STORY["Phase"]

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
    all_of_them = (_bridge("PortalDown", severity="page"),)
    return [
        _Scene(before),
        _Scene(_Phase(9, during.scrapes)),
        _Scene(_Phase(5, during.scrapes), many=all_of_them),
        _Scene(during, (_bridge("PortalUnreachable"),), all_of_them),
        _Scene(agent.phase(15)),
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
        _Scene(before),
        _Scene(during),
        _Scene(_Phase(30, during.scrapes), (_bridge("ApprovedButWaiting", each=True),)),
        _Scene(agent.phase(15)),
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
    firing = (_bridge("ApprovalsFailing", labels=labels),)
    return [_Scene(before), _Scene(agent.phase(15), firing), _Scene(agent.phase(60))]


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
    firing = (_bridge("ForgedDecision", labels=labels),)
    return [_Scene(before), _Scene(agent.phase(15), firing), _Scene(agent.phase(60))]


def _portal(stage: Stage, name: str = "portal") -> PortalStub:
    portal = PortalStub(stage.directory / name)
    stage.close_with(portal.close)
    return portal
