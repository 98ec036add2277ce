"""A real agent in which every metric has something to show: for what looks at all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from alert_stories.live import LiveAgent
from alert_stories.stage import Stage
from alert_stories.timeline import Phase
from portal_stub import PortalStub

_DAY_SECONDS = 86_400.0
_RULE = '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'


def busy_phase(directory: Path, env: Mapping[str, str], *, minutes: int) -> Phase:
    """Return *minutes* of an agent that delivers, fails, is refused, approves, and owes to a sink that is gone."""
    with Stage(directory, env) as stage, PortalStub(directory / "portal") as portal:
        agent = _owing_to_a_sink_that_is_gone(stage, stage.webhook() + _RULE + portal.toml(wait_seconds=1))
        agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
        _have_a_record_parked(stage, agent)
        _approve(stage, agent)
        _be_unauthorized(stage, agent)
        return agent.phase(minutes, meanwhile=lambda: _live_on(stage, agent))


def _owing_to_a_sink_that_is_gone(stage: Stage, tables: str) -> LiveAgent:
    agent = stage.watching(stage.webhook("old"))
    stage.peer.refuse_for_now()
    stage.announce("Reboot", notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_pending_records", sink="old"))
    agent.configure(tables)
    agent.signal("SIGHUP")
    agent.wait_for(lambda scrape: scrape.of("sink_configured", sink="old") == 0)
    stage.peer.accept()
    agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre"))
    return agent


def _have_a_record_parked(stage: Stage, agent: LiveAgent) -> None:
    stage.peer.refuse_for_good()
    stage.announce("Redeploy", notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_parked_records", sink="sre"))
    stage.peer.accept()


def _approve(stage: Stage, agent: LiveAgent) -> None:
    approvals = agent.scrape().sum("approvals_total")
    stage.announce("Freeze", notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.sum("approvals_total") > approvals)
    agent.wait_for(lambda scrape: scrape.of("sink_pending_records", sink="sre") == 0)


def _be_unauthorized(stage: Stage, agent: LiveAgent) -> None:
    stage.peer.say(401)
    stage.announce("Terminate", notice_seconds=_DAY_SECONDS)
    agent.wait_for(lambda scrape: scrape.of("sink_needs_attention", sink="sre"))


def _live_on(stage: Stage, agent: LiveAgent) -> None:
    stage.peer.accept()
    agent.call("outbox", "retry", "--sink", "sre")
    agent.wait_for(lambda scrape: scrape.of("sink_pending_records", sink="sre") == 0)
    _have_a_record_parked(stage, agent)  # the one before was tried again, too
    _approve(stage, agent)
    _be_unauthorized(stage, agent)
