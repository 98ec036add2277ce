"""Reading the configuration again: what cannot be put in force is logged, and the agent goes on."""

import pytest

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
    reload_configuration(agent, config, lambda: False)
    assert agent.refused == 1
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "not in force as a whole" in said.message


def test_a_file_that_was_emptied_is_not_taken_for_one_without_settings(tmp_path, caplog):
    config = tmp_path / "config.toml"
    config.write_text(" \n")
    agent = Refusing(AssertionError("It was to change nothing."))
    reload_configuration(agent, config, lambda: False)
    assert agent.refused == 1
    assert "is empty" in caplog.text
