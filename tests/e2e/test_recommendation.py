"""SpotRebalanceRecommendation events: records, API versions of IMDS, and rejected approvals."""

import pytest

from bridge.testing import EventSpec, Fault

PREVIEW, STABLE = "2024-07-09", "2020-07-01"
RISK = EventSpec(event_type="SpotRebalanceRecommendation", on_not_before="stay")
ANY_EVENT = '[[approval.rules]]\nname = "all"\naction = "approve"\nresources = "any"\nact = "each"\n'
THIS_TYPE = '[[approval.rules]]\nname = "this"\nevent_types = ["SpotRebalanceRecommendation"]\naction = "approve"\n'


def polled(azure, version):
    return [each for each in azure.requests if each.api_version == version and each.status == 200]


def refuse(azure, *, count=None, status=400):
    azure.world.set_fault(Fault(kind="status", status=status, api_version=PREVIEW, count=count))


def test_withdrawn_recommendation_is_recorded_before_the_eviction(agent, azure):
    agent.configure(azure.endpoint, '[[sinks]]\ntype = "stdout"\n')
    agent.start()
    risk = azure.world.add_event(RISK)
    agent.wait_for(lambda: agent.transitions == [("scheduled", "observed")])
    azure.world.cancel(risk)
    agent.wait_for(lambda: agent.transitions[1:] == [("canceled", "inferred")])
    azure.world.add_event(EventSpec(event_type="Preempt"))
    agent.wait_for(lambda: len(agent.records) == 3)
    types = ["SpotRebalanceRecommendation", "SpotRebalanceRecommendation", "Preempt"]
    assert [each["event"]["event_type"] for each in agent.records] == types
    assert agent.stop() == 0


@pytest.mark.parametrize("rule", [ANY_EVENT, THIS_TYPE], ids=["any event", "this type"])
def test_neither_rules_nor_the_command_approve_a_recommendation(agent, azure, rule):
    agent.configure(azure.endpoint, f'[[sinks]]\ntype = "stdout"\n{rule}')
    agent.start()
    risk = azure.world.add_event(RISK)
    agent.wait_for(lambda: agent.transitions == [("scheduled", "observed")])
    code, out, err = agent.call("approve", risk, "--yes", "--config", agent.config)
    assert (code, out) == (1, "")
    assert "Acknowledging a recommendation has no effect." in err
    before = len(azure.requests)
    agent.wait_for(lambda: len(azure.requests) > before + 5)
    assert azure.world.approvals == ()
    assert agent.transitions == [("scheduled", "observed")]
    assert agent.stop() == 0


@pytest.mark.parametrize("status", [400, 404])
def test_agent_polls_the_stable_version_if_imds_rejects_the_preview_version(agent, azure, status):
    refuse(azure, status=status)
    agent.configure(azure.endpoint, f'[[sinks]]\ntype = "stdout"\n{ANY_EVENT}')
    agent.start()
    azure.world.add_event(RISK)
    azure.world.add_event(EventSpec(event_type="Reboot", on_approval="never"))
    agent.wait_for(lambda: agent.transitions == [("scheduled", "observed"), ("approved", "observed")])
    assert [each.api_version for each in azure.requests if each.method == "POST"] == [STABLE]
    assert polled(azure, PREVIEW) == []
    assert agent.stop() == 0
    assert '"WARNING"' not in agent.log
