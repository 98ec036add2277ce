"""A destination that is away, refuses the agent or its records, or is no longer configured."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.deploy.metrics.live import LiveAgent
    from tests.deploy.metrics.stage import Stage
    from tests.deploy.metrics.story import Stories
    from tests.deploy.metrics.timeline import Phase, Scrape
    from tests.deploy.metrics.unit_test import Firing, Scene

# By path: the directories of tests are no packages.
_HERE = Path(__file__).parent
_STORY = runpy.run_path(str(_HERE / "story.py"))
STORIES: Stories = _STORY["Stories"]()
_bridge: Callable[..., Firing] = _STORY["bridge"]
_Scene: type[Scene] = _STORY["Scene"]
_Phase: type[Phase] = _STORY["Phase"]

_SRE = (("sink", "sre"),)
_DAY_SECONDS = 86_400.0


@STORIES.tell("A sink's token has expired", agents=(1, 3))
def sink_unauthorized(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    stage.peer.say(401)
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_needs_attention", sink="sre"))
    during = agent.phase(60)
    _mend(stage, agent)
    firing = (_bridge("SinkNeedsAttention", labels=_SRE),)
    return [
        _Scene(before),
        _Scene(_Phase(9, during.scrapes)),
        _Scene(during, firing, (_bridge("SinkDown", severity="page", labels=_SRE),)),
        _Scene(agent.phase(15)),
    ]


@STORIES.tell("The destination of a sink is down, and records wait", agents=(1, 3))
def sink_down(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    stage.peer.refuse_for_now()
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.sum("sink_retries_total"))
    during = agent.phase(37)
    _mend(stage, agent)
    return [
        _Scene(before),
        _Scene(during),
        _Scene(
            _Phase(23, during.scrapes),
            (_bridge("SinkNotDelivering", labels=_SRE),),
            (_bridge("SinkDown", severity="page", labels=_SRE),),
        ),
        _Scene(agent.phase(15)),
    ]


@STORIES.tell("A destination refuses a record for good")
def record_refused(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    stage.peer.refuse_for_good()
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_parked_records", sink="sre"))
    during = agent.phase(30)
    stage.peer.accept()
    agent.call("outbox", "retry")
    agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre"))
    return [
        _Scene(before),
        _Scene(_Phase(14, during.scrapes)),
        _Scene(during, (_bridge("RecordsParked", labels=_SRE),)),
        _Scene(agent.phase(15)),
    ]


@STORIES.tell("A backlog fills the outbox, and then does not fit into it any more")
def outbox_full(stage: Stage) -> list[Scene]:
    agent = stage.watching(stage.webhook() + "[state]\nmax_bytes = 2_097_152\n")
    before = agent.phase(15)
    stage.peer.refuse_for_now()
    _announce_until(stage, agent, lambda scrape: (scrape.of("outbox_bytes") or 0) > 0.85 * 2_097_152)
    filling = agent.phase(20)
    assert not filling.scrapes or filling.scrapes[1].of("sink_evicted_total", sink="sre") == 0
    _announce_until(stage, agent, lambda scrape: scrape.of("sink_evicted_total", sink="sre"))
    losing = agent.phase(30)
    _mend(stage, agent)
    waiting, full = _bridge("SinkNotDelivering", labels=_SRE), _bridge("OutboxNearlyFull", each=True)
    lost = _bridge("RecordsEvicted", labels=_SRE)
    return [
        _Scene(before),
        _Scene(_Phase(70, filling.scrapes), (waiting,)),
        _Scene(filling, (waiting, full)),
        _Scene(losing, (waiting, full, lost)),
        _Scene(agent.phase(15), (lost,)),
        _Scene(agent.phase(60)),
    ]


@STORIES.tell("Records grow older than their sink's max_age_seconds")
def records_expired(stage: Stage) -> list[Scene]:
    agent = stage.watching(stage.webhook(more="max_age_seconds = 1"))
    before = agent.phase(15)
    stage.peer.refuse_for_now()
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_expired_total", sink="sre"))
    during = agent.phase(30)
    return [_Scene(before), _Scene(during, (_bridge("RecordsExpired", labels=_SRE),)), _Scene(agent.phase(60))]


@STORIES.tell("A sink that is owed records is taken out of the configuration")
def sink_renamed(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    stage.peer.refuse_for_now()
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.sum("sink_retries_total"))
    agent.configure(stage.webhook("sre-alerts"))
    agent.signal("SIGHUP")
    agent.wait_for(lambda scrape: scrape.of("sink_configured", sink="sre") == 0)
    stage.peer.accept()
    agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre-alerts"))
    during = agent.phase(31)
    agent.call("outbox", "discard", "--sink", "sre", "--yes")
    agent.wait_for(lambda scrape: not scrape.of("sink_pending_records", sink="sre"))
    return [
        _Scene(before),
        _Scene(_Phase(59, during.scrapes)),
        _Scene(during, (_bridge("RecordsOwedToNobody", labels=_SRE),)),
        _Scene(agent.phase(15)),
    ]


def _mend(stage: Stage, agent: LiveAgent) -> None:
    """Have the destination accept, and wait until it has everything."""
    stage.peer.accept()
    agent.call("outbox", "retry")
    agent.wait_for(lambda scrape: scrape.sum("sink_pending_records") == 0)


def _announce_until(stage: Stage, agent: LiveAgent, is_so: Callable[[Scrape], object]) -> None:
    """Announce and cancel many events: the document stays small by that, the outbox does not."""
    while not is_so(agent.scrape()):
        known = [stage.announce(notice_seconds=_DAY_SECONDS, description="x" * 500) for _ in range(40)]
        _wait_for_events(agent, len(known))
        for event_id in known:
            stage.azure.world.cancel(event_id)
        _wait_for_events(agent, 0)


def _wait_for_events(agent: LiveAgent, count: int) -> None:
    agent.wait_for(lambda scrape: scrape.sum("active_events") == count)
