"""Reading the configuration again: what cannot be put in force is logged, and the agent goes on."""

import os
from contextlib import nullcontext

import pytest
from starved import no_threads

from bridge.cli.run import reload_configuration
from bridge.errors import OutboxError


class Refusing:
    """An agent that cannot put a configuration in force."""

    refused = 0

    def __init__(self, error):
        self.error = error

    def reload(self, *_):
        raise self.error

    def refused_configuration(self):
        self.refused += 1


@pytest.mark.parametrize("error", [OutboxError("The outbox failed."), PermissionError(13, "Permission denied")])
def test_a_reload_that_fails_on_the_way_is_said_and_does_not_end_the_agent(tmp_path, caplog, error):
    config = tmp_path / "config.toml"
    config.write_text("stop_grace_seconds = 1\n")
    agent = Refusing(error)
    assert reload_configuration(agent, config, lambda: False)
    assert agent.refused == 1
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "not in force as a whole" in said.message


@pytest.mark.parametrize("starves_reading", [True, False])
def test_a_reload_that_gets_no_thread_is_said_and_tried_again(tmp_path, caplog, starves_reading):
    config = tmp_path / "config.toml"
    config.write_text("stop_grace_seconds = 1\n")
    agent = Refusing(RuntimeError("can't start new thread"))
    with no_threads() if starves_reading else nullcontext():
        assert not reload_configuration(agent, config, lambda: False)
    assert agent.refused == 1
    assert "It is tried again" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a file whose end never comes is a FIFO")
def test_a_file_that_cannot_be_read_to_its_end_holds_no_stop_up(tmp_path):
    os.mkfifo(tmp_path / "config.toml")
    agent = Refusing(AssertionError("It was to change nothing."))
    assert reload_configuration(agent, tmp_path / "config.toml", lambda: True)
    assert agent.refused == 0
    os.close(os.open(tmp_path / "config.toml", os.O_WRONLY))  # lets the thread that reads go


def test_a_file_that_was_emptied_is_not_taken_for_one_without_settings(tmp_path, caplog):
    config = tmp_path / "config.toml"
    config.write_text(" \n")
    agent = Refusing(AssertionError("It was to change nothing."))
    reload_configuration(agent, config, lambda: False)
    assert agent.refused == 1
    assert "is empty" in caplog.text
