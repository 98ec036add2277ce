"""The ops portal, its decisions and the rules in trouble."""

from __future__ import annotations

from alert_stories.stage import Stage
from alert_stories.story import Stories, bridge
from alert_stories.timeline import Phase
from alert_stories.unit_test import Scene
from portal_stub import PortalStub

STORIES = Stories()


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


def _portal(stage: Stage, name: str = "portal") -> PortalStub:
    portal = PortalStub(stage.directory / name)
    stage.close_with(portal.close)
    return portal
