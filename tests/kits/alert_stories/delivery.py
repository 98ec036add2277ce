"""A destination that is away, refuses the agent or its records, or is no longer configured."""

from __future__ import annotations

from collections.abc import Callable

from alert_stories.live import LiveAgent
from alert_stories.stage import Stage
from alert_stories.story import Stories, bridge
from alert_stories.timeline import Phase, Scrape
from alert_stories.unit_test import Scene

STORIES = Stories()

_SRE = (("sink", "sre"),)
_DAY_SECONDS = 86_400.0


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
        Scene(before),
        Scene(during),
        Scene(
            Phase(23, during.scrapes),
            (bridge("SinkNotDelivering", labels=_SRE),),
            (bridge("SinkDown", severity="page", labels=_SRE),),
        ),
        Scene(agent.phase(15)),
    ]


@STORIES.tell("A destination rejects a record permanently")
def record_refused(stage: Stage) -> list[Scene]:
    # Else a 400 of an endpoint that has accepted nothing yet is taken as one about the endpoint.
    agent = stage.watching(stage.webhook(more="park_statuses = [400]"))
    before = agent.phase(15)
    stage.peer.refuse_for_good()
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_parked_records", sink="sre"))
    during = agent.phase(30)
    stage.peer.accept()
    agent.call("outbox", "retry")
    agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre"))
    return [
        Scene(before),
        Scene(Phase(14, during.scrapes)),
        Scene(during, (bridge("RecordsParked", labels=_SRE),)),
        Scene(agent.phase(15)),
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
    waiting, full = bridge("SinkNotDelivering", labels=_SRE), bridge("OutboxNearlyFull", each=True)
    lost = bridge("RecordsEvicted", labels=_SRE)
    return [
        Scene(before),
        Scene(Phase(70, filling.scrapes), (waiting,)),
        Scene(filling, (waiting, full)),
        Scene(losing, (waiting, full, lost)),
        Scene(agent.phase(15), (lost,)),
        Scene(agent.phase(60)),
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
