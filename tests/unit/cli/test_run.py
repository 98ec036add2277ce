"""A reload that fails halfway is logged, and the agent continues."""

import pytest

from bridge.cli.run import reload_configuration
from bridge.errors import OutboxError
from bridge.metrics.metrics import Metrics


class Refusing:
    """An agent that cannot apply a configuration."""

    def __init__(self, error):
        self.error = error
        self.metrics = Metrics()

    def reload(self, *_):
        raise self.error


@pytest.mark.parametrize("error", [OutboxError("The outbox failed."), RuntimeError("can't start new thread")])
def test_failed_reload_is_logged_and_the_agent_continues(tmp_path, caplog, error):
    config = tmp_path / "config.toml"
    config.write_text("stop_grace_seconds = 1\n")
    agent = Refusing(error)
    reload_configuration(agent, config, lambda: False)
    assert not agent.metrics.is_reload_successful
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "Only a part of the new configuration is in effect" in said.message
