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


@STORIES.tell("The agent hangs as a whole, as under a debugger")
def agent_frozen(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    agent.signal("SIGSTOP")
    assert not _answers(agent)
    agent.signal("SIGCONT")
    agent.wait(lambda: _answers(agent))
    return [Scene(before), Scene(Phase(20), (bridge("Down", each=True),)), Scene(agent.phase(15))]


@STORIES.tell("Prometheus finds no agent at all")
def no_agent_found(stage: Stage) -> list[Scene]:
    watched = stage.watching().phase(15)
    return [
        Scene(watched),
        Scene(Phase(9, is_target=False)),
        Scene(Phase(11, is_target=False), (bridge("Absent", severity="page"),)),
        Scene(Phase(15, watched.scrapes)),
    ]


@STORIES.tell("The agent dies again and again")
def agent_restarting(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    scenes = [Scene(agent.phase(60))]
    for restart in range(1, 6):
        agent.kill()
        agent.watch()
        firing = (bridge("Restarting", each=True),) if restart > 3 else ()
        scenes += [Scene(Phase(1), firing if restart > 4 else ()), Scene(agent.phase(9), firing)]
    return [*scenes, Scene(agent.phase(60))]


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


@STORIES.tell("The metadata service takes its time for the first answer, as it may")
def first_answer_slow(stage: Stage) -> list[Scene]:
    stage.azure.world.set_fault(Fault(kind="slow", delay_seconds=6.0, count=1))
    agent = stage.agent()
    agent.configure(stage.webhook())
    agent.start()
    waiting = agent.phase(3)
    assert waiting.scrapes is not None
    assert waiting.scrapes[1].of("last_good_poll_timestamp_seconds") == 0
    agent.wait_for(lambda scrape: scrape.of("polls_total", result="ok"))
    return [Scene(waiting), Scene(agent.phase(30))]


@STORIES.tell("The metadata service never answers from the start")
def imds_never(stage: Stage) -> list[Scene]:
    stage.azure.world.set_fault(Fault(kind="disconnect"))
    agent = stage.agent()
    agent.configure(stage.webhook())
    agent.start()
    agent.wait_for(lambda scrape: scrape.of("polls_total", result="unreachable"))
    during = agent.phase(15)
    stage.azure.world.clear_faults()
    agent.wait_for(lambda scrape: scrape.of("polls_total", result="ok"))
    return [Scene(during, (bridge("NotWatching", each=True),)), Scene(agent.phase(15))]


@STORIES.tell("The metadata service tells events, but not who this VM is")
def identity_unknown(stage: Stage) -> list[Scene]:
    stage.azure.world.set_fault(Fault(kind="status", status=500, target="identity"))
    agent = stage.watching()
    during = agent.phase(16)
    agent.stop()
    stage.azure.world.clear_faults()
    agent.watch()
    return [
        Scene(Phase(29, during.scrapes)),
        Scene(during, (bridge("IdentityUnknown", each=True),)),
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
