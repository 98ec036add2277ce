"""The agent, its VM and its metadata service in trouble."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.testing import Fault

if TYPE_CHECKING:
    from tests.deploy.metrics.live import LiveAgent
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


@STORIES.tell("The agent is killed, and started again", agents=(1, 3))
def agent_killed(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    agent.kill()
    assert not _answers(agent)
    agent.start()
    return [
        _Scene(before),
        _Scene(_Phase(9)),
        _Scene(_Phase(10), (_bridge("Down", each=True),), (_bridge("FleetBlind", severity="page"),)),
        _Scene(agent.phase(15)),
    ]


@STORIES.tell("The agent hangs as a whole, as under a debugger")
def agent_frozen(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    agent.signal("SIGSTOP")
    assert not _answers(agent)
    agent.signal("SIGCONT")
    agent.wait(lambda: _answers(agent))
    return [_Scene(before), _Scene(_Phase(20), (_bridge("Down", each=True),)), _Scene(agent.phase(15))]


@STORIES.tell("Prometheus finds no agent at all")
def no_agent_found(stage: Stage) -> list[Scene]:
    watched = stage.watching().phase(15)
    return [
        _Scene(watched),
        _Scene(_Phase(9, is_target=False)),
        _Scene(_Phase(11, is_target=False), (_bridge("Absent", severity="page"),)),
        _Scene(_Phase(15, watched.scrapes)),
    ]


@STORIES.tell("The agent dies again and again")
def agent_restarting(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    scenes = [_Scene(agent.phase(60))]
    for restart in range(1, 6):
        agent.kill()
        agent.start()
        firing = (_bridge("Restarting", each=True),) if restart > 3 else ()
        scenes += [_Scene(_Phase(1), firing if restart > 4 else ()), _Scene(agent.phase(9), firing)]
    return [*scenes, _Scene(agent.phase(60))]


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
    firing = (_bridge("NotWatching", each=True),)
    return [
        _Scene(before),
        _Scene(_Phase(9, during.scrapes)),
        _Scene(during, firing, (_bridge("FleetBlind", severity="page"),)),
        _Scene(agent.phase(15)),
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
    return [_Scene(waiting), _Scene(agent.phase(30))]


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
    return [_Scene(during, (_bridge("NotWatching", each=True),)), _Scene(agent.phase(15))]


@STORIES.tell("The metadata service tells events, but not who this VM is")
def identity_unknown(stage: Stage) -> list[Scene]:
    stage.azure.world.set_fault(Fault(kind="status", status=500, target="identity"))
    agent = stage.watching()
    during = agent.phase(16)
    agent.stop()
    stage.azure.world.clear_faults()
    agent.start()
    agent.wait_for(lambda scrape: scrape.of("polls_total", result="ok"))
    return [
        _Scene(_Phase(29, during.scrapes)),
        _Scene(during, (_bridge("IdentityUnknown", each=True),)),
        _Scene(agent.phase(15)),
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
        _Scene(before),
        _Scene(_Phase(4, during.scrapes)),
        _Scene(during, (_bridge("ConfigReloadFailed"),)),
        _Scene(agent.phase(15)),
    ]


def _answers(agent: LiveAgent) -> bool:
    try:
        agent.scrape()
    except OSError:
        return False
    return True
