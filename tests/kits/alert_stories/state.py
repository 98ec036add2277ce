"""Failures of the disk and of the outbox file."""

from __future__ import annotations

from alert_stories.stage import Stage
from alert_stories.story import Stories, bridge
from alert_stories.timeline import Phase
from alert_stories.unit_test import Scene

STORIES = Stories()

_DAY_SECONDS = 86_400.0


@STORIES.tell("The disk refuses writes")
def disk_refuses(stage: Stage) -> list[Scene]:
    import resource  # noqa: PLC0415  # Windows has none

    agent = stage.watching()
    before = agent.phase(15)
    assert agent.process is not None
    limits = resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("outbox_behind_seconds"))
    during = agent.phase(11)
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, limits)
    agent.wait_for(lambda scrape: scrape.of("outbox_behind_seconds") == 0)
    return [
        Scene(before),
        Scene(Phase(9, during.scrapes)),
        Scene(during, (bridge("OutboxBehind", each=True),)),
        Scene(agent.phase(15)),
    ]
