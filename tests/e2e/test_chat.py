"""The recipes for Slack and Teams with a real agent: one message per event, with a link to the VM."""

import json

import pytest
import strict_services

from bridge.cli.init import recipe
from bridge.testing import EventSpec, Simulator
from bridge.testing.http_contract import Answer, HttpPeer

pytest.importorskip("jinja2", reason="the extra [template] is not installed")


@pytest.mark.parametrize("service", ["slack", "teams"])
def test_chat_gets_one_message_for_each_event(agent, tmp_path, service):
    refusal, accepted, path = strict_services.SERVICES[f"webhook:{service}"]
    with Simulator(vms=["vm_0"], rate_limit=False) as azure, HttpPeer() as chat:
        chat.reply(lambda request: Answer(status=400 if refusal(request) else accepted))
        (tmp_path / f"{service}-url").write_text(f"http://{chat.address.authority}{path}")
        text = recipe(f"webhook:{service}").replace("/etc/scheduled-events-bridge", str(tmp_path))
        agent.configure(azure.endpoint, f'[[sinks]]\ntype = "stdout"\n{text}')
        agent.start()
        world = azure.world
        freeze = world.add_event(EventSpec(event_type="Freeze", notice_seconds=900))
        reboot = world.add_event(EventSpec(event_type="Reboot", notice_seconds=900))
        failure = world.add_event(EventSpec(event_type="Redeploy", status="Started"))
        agent.wait_for(lambda: len(agent.records) == 3)
        world.start(freeze)
        world.cancel(reboot)
        agent.wait_for(lambda: len(agent.records) == 5)
        world.complete(freeze)
        world.complete(failure)
        agent.wait_for(lambda: len(agent.records) == 7)
        assert agent.stop() == 0
        bodies = [json.dumps(json.loads(request.body), ensure_ascii=False) for request in chat.requests]
    titles = ["\u2139\ufe0f Freeze of vm_0 scheduled", "\u26a0\ufe0f Reboot of vm_0 scheduled"]
    titles += ["\u26a0\ufe0f Redeploy of vm_0 started"]
    assert sorted([title in body for title in titles].index(True) for body in bodies) == [0, 1, 2]
    assert all("https://portal.azure.com/#@/resource/subscriptions/" in body for body in bodies)
