"""The state directory is deleted, moved, or replaced under a running agent. Two agents never run on one directory."""

import shutil
import signal
import subprocess

import pytest

STDOUT = '[[sinks]]\nname = "out"\ntype = "stdout"\n'


def document(incarnation, *event_ids):
    events = [
        {"EventId": event_id, "EventStatus": "Scheduled", "EventType": "Freeze", "Resources": ["vm_0"]}
        for event_id in event_ids
    ]
    return {"DocumentIncarnation": incarnation, "Events": events}


def _deleted(state):
    shutil.rmtree(state)


def _moved(state):
    state.rename(state.with_name("moved"))


def _replaced(state):
    _moved(state)
    state.mkdir(mode=0o700)


GONE = {"deleted": _deleted, "moved": _moved, "replaced": _replaced}


def start(agent, imds):
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.configure(imds.url, STDOUT)
    agent.start()
    imds.wait_for_polls(2)
    agent.wait_for(lambda: "The agent is running" in agent.log)


def told(agent):
    return [(record["event"]["event_id"], record["transition"]) for record in agent.records]


@pytest.mark.parametrize("how", GONE)
def test_agent_takes_the_lock_again_and_a_second_run_ends_with_73(agent, imds, how):
    start(agent, imds)
    GONE[how](agent.state)
    agent.wait_for(lambda: "locked the new directory" in agent.log)
    code, _, errors = agent.call("run", "--config", agent.config)
    assert (code, "Another agent runs" in errors) == (73, True)
    agent.wait_for((agent.state / "outbox-1.db").exists)
    imds.show(document(2, "E-1"))
    agent.wait_for(lambda: agent.records)
    assert agent.stop() == 0
    assert told(agent) == [("E-1", "scheduled")]


def test_agent_that_finds_another_on_its_directory_ends_with_73_and_leaves_it_alone(agent, imds):
    start(agent, imds)
    imds.show(document(2, "E-1"))
    agent.wait_for(lambda: agent.records)
    agent.process.send_signal(signal.SIGSTOP)
    _deleted(agent.state)
    with (agent.directory / "second.jsonl").open("wb") as out, (agent.directory / "second.log").open("wb") as err:
        second = subprocess.Popen(
            agent.command("run", "--config", agent.config),
            stdout=out,
            stderr=err,
            env=agent.env,
            cwd=agent.directory,
        )
    try:
        agent.wait_for((agent.directory / "second.jsonl").read_text)
        database = (agent.state / "outbox-1.db").stat().st_ino
        agent.process.send_signal(signal.SIGCONT)
        assert agent.process.wait(20) == 73
        assert "Another agent runs" in agent.log
        assert (agent.state / "outbox-1.db").stat().st_ino == database
        assert not (agent.state / "outbox-2.db").exists(), "the first agent wrote into the directory of the second"
        imds.show(document(3, "E-1", "E-2"))
        agent.process = second
        agent.wait_for(lambda: len((agent.directory / "second.jsonl").read_text().splitlines()) == 2)
        assert agent.stop() == 0
    finally:
        second.kill()
        second.wait()
    assert told(agent) == [("E-1", "scheduled")]
    assert len((agent.directory / "second.jsonl").read_text().splitlines()) == 2
