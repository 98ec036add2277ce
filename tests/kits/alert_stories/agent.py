"""The agent, its VM and its metadata service in trouble."""

from __future__ import annotations

from alert_stories.live import LiveAgent
from alert_stories.stage import Stage
from alert_stories.story import Stories, bridge
from alert_stories.timeline import Phase
from alert_stories.unit_test import Scene

from bridge.testing import Fault

STORIES = Stories()


@STORIES.tell("The agent is killed, and started again", agents=(1, 3))
def agent_killed(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    agent.kill()
    assert not _answers(agent)
    agent.watch()
    return [
        Scene(before),
        Scene(Phase(9)),
        Scene(Phase(10), (bridge("Down", each=True),), (bridge("FleetBlind", severity="page"),)),
        Scene(agent.phase(15)),
    ]


@STORIES.tell("The metadata service does not answer", agents=(1, 3))
def imds_unreachable(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    stage.azure.world.set_fault(Fault(kind="disconnect"))
    agent.wait_for(lambda scrape: scrape.of("polls_total", result="unreachable"))
    during = agent.phase(30)
    stage.azure.world.clear_faults()
    good = during.scrapes[1].of("polls_total", result="ok") if during.scrapes else 0
    agent.wait_for(lambda scrape: scrape.of("polls_total", result="ok") != good)
    firing = (bridge("NotWatching", each=True),)
    return [
        Scene(before),
        Scene(Phase(9, during.scrapes)),
        Scene(during, firing, (bridge("FleetBlind", severity="page"),)),
        Scene(agent.phase(15)),
    ]


@STORIES.tell("A wrong configuration is rolled out", agents=(1, 3))
def config_refused(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    right = agent.config.read_text()
    agent.config.write_text(right + "no_such_key = 1\n")
    agent.signal("SIGHUP")
    agent.wait_for(lambda scrape: scrape.of("config_last_reload_successful") == 0)
    during = agent.phase(15)
    agent.config.write_text(right)
    agent.signal("SIGHUP")
    agent.wait_for(lambda scrape: scrape.of("config_last_reload_successful") == 1)
    return [
        Scene(before),
        Scene(Phase(4, during.scrapes)),
        Scene(during, (bridge("ConfigReloadFailed"),)),
        Scene(agent.phase(15)),
    ]


def _answers(agent: LiveAgent) -> bool:
    try:
        agent.scrape()
    except OSError:
        return False
    return True
