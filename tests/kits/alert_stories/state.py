"""Failures of the disk and of the outbox file."""

from __future__ import annotations

import shutil

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


@STORIES.tell("The database is damaged under the agent")
def database_damaged(stage: Stage) -> list[Scene]:
    agent = stage.watching()
    before = agent.phase(15)
    database = agent.state / "outbox-1.db"
    database.write_bytes(bytes(reversed(database.read_bytes())))
    agent.wait_for(lambda scrape: scrape.of("outbox_new_files_total"))
    during = agent.phase(15)
    agent.stop()
    agent.watch()
    return [Scene(before), Scene(during, (bridge("OutboxNewFile", each=True),)), Scene(agent.phase(15))]


@STORIES.tell("The state directory came with another machine's image")
def state_of_another_machine(stage: Stage) -> list[Scene]:
    first = stage.watching()
    first.stop()
    second = stage.agent("second", vm="vm_1")
    shutil.copytree(first.state, second.state)
    second.configure(stage.webhook())
    second.watch()
    second.wait_for(lambda scrape: scrape.of("outbox_new_files_total"))
    return [Scene(second.phase(15), (bridge("OutboxNewFile", each=True),))]


@STORIES.tell("The state directory is in memory", place_counts=True)
def state_in_memory(stage: Stage) -> list[Scene]:
    agent = stage.agent(state=stage.directory_in_memory())
    agent.configure(stage.webhook())
    agent.watch()
    agent.wait_for(lambda scrape: scrape.of("state_on_ephemeral_disk"))
    return [Scene(agent.phase(30)), Scene(agent.phase(60), (bridge("StateOnEphemeralDisk"),))]


@STORIES.tell("The disk under the outbox hangs")
def disk_hangs(stage: Stage) -> list[Scene]:
    disk = stage.disk()
    agent = stage.agent(state=disk.path / "state")
    agent.configure(stage.webhook())
    agent.watch()
    before = agent.phase(15)
    disk.hang()
    stage.announce(notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("outbox_behind_seconds"))
    agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre"))
    during = agent.phase(11)
    disk.go_on()
    agent.wait_for(lambda scrape: scrape.of("outbox_behind_seconds") == 0)
    firing = (bridge("OutboxBehind", each=True),)
    return [Scene(before), Scene(Phase(9, during.scrapes)), Scene(during, firing), Scene(agent.phase(15))]
