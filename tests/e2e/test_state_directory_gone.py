"""The state directory is moved or replaced under a running agent. Two agents never run on one directory."""

import pytest
from imds_documents import document, event

STDOUT = '[[sinks]]\nname = "out"\ntype = "stdout"\n'


def _moved(state):
    state.rename(state.with_name("moved"))


def _replaced(state):
    _moved(state)
    state.mkdir(mode=0o700)


def start(agent, imds):
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.configure(imds.url, STDOUT)
    agent.start()
    imds.wait_for_polls(2)
    agent.wait_for(lambda: "The agent is running" in agent.log)


def transitions(agent):
    return [(record["event"]["event_id"], record["transition"]) for record in agent.records]


@pytest.mark.parametrize("how", [_moved, _replaced])
def test_agent_relocks_a_replaced_state_directory_and_a_second_run_exits_73(agent, imds, how):
    start(agent, imds)
    how(agent.state)
    agent.wait_for(lambda: "locked the new directory" in agent.log)
    code, _, errors = agent.call("run", "--config", agent.config)
    assert (code, "Another agent runs" in errors) == (73, True)
    agent.wait_for((agent.state / "outbox-1.db").exists)
    imds.show(document(2, event("E-1")))
    agent.wait_for(lambda: agent.records)
    assert agent.stop() == 0
    assert transitions(agent) == [("E-1", "scheduled")]
