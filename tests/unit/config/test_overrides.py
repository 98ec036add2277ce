"""The settings that the environment sets before the file: only those, checked as in the file, and named."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bridge.cli.commands import commands
from bridge.config.loader import load, state_directory
from bridge.config.overrides import OVERRIDES
from bridge.errors import ConfigurationError

LISTEN = "SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN"
DIRECTORY = "SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("""[status]\nlisten = "127.0.0.1:1"\n[state]\ndirectory = "/of/the/file"\nmax_bytes = 2000000\n""")
    return path


def test_environment_goes_before_the_file_and_leaves_the_rest(config):
    settings = load(config, {LISTEN: "[::1]:9464", DIRECTORY: "/of/the/manifest"})
    assert settings.status.address == ("::1", 9464)
    assert state_directory(settings, {"STATE_DIRECTORY": "/of/systemd"}).as_posix() == "/of/the/manifest"
    assert settings.state.max_bytes == 2_000_000
    assert settings.overrides == (("status.listen", LISTEN), ("state.directory", DIRECTORY))
    assert settings.file == config


def test_environment_counts_without_a_file_too():
    assert load(None, {LISTEN: "0.0.0.0:9464"}).status.address == ("0.0.0.0", 9464)


@pytest.mark.parametrize("environ", [{}, {LISTEN: "", DIRECTORY: ""}, {"SCHEDULED_EVENTS_BRIDGE_VM_NAME": "node"}])
def test_what_is_not_set_or_empty_or_no_setting_changes_nothing(config, environ):
    settings = load(config, environ)
    assert (settings, settings.overrides) == (load(config), ())


def test_wrong_value_is_refused_by_the_name_of_its_variable_beside_the_mistakes_of_the_file(tmp_path):
    with pytest.raises(ConfigurationError) as alone:
        load(None, {LISTEN: "everywhere"})
    [sentence] = alone.value.mistakes
    assert sentence.startswith(f"${LISTEN} is 'everywhere', but must be \"host:port\"")
    path = tmp_path / "config.toml"
    path.write_text("stop_grace_seconds = -1\n")
    with pytest.raises(ConfigurationError) as both:
        load(path, {LISTEN: "everywhere"})
    assert [each.partition(" ")[0] for each in both.value.mistakes] == ["stop_grace_seconds", f"${LISTEN}"]


def test_help_names_every_variable():
    said = CliRunner().invoke(commands, ["--help"]).output
    assert all(f"${variable}" in said for variable in OVERRIDES)
