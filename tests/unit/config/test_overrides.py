"""Environment variables that override settings of the file, with the same validation."""

import pytest
from click.testing import CliRunner

from bridge.cli.commands import commands
from bridge.config.loader import OVERRIDES, load, state_directory
from bridge.errors import ConfigurationError

LISTEN = "SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN"
DIRECTORY = "SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("""[status]\nlisten = "127.0.0.1:1"\n[state]\ndirectory = "/of/the/file"\nmax_bytes = 2000000\n""")
    return path


def test_environment_overrides_only_its_settings_of_the_file(config):
    settings = load(config, {LISTEN: "[::1]:9464", DIRECTORY: "/of/the/manifest"})
    assert settings.status.address == ("::1", 9464)
    assert state_directory(settings, {"STATE_DIRECTORY": "/of/systemd"}).as_posix() == "/of/the/manifest"
    assert settings.state.max_bytes == 2_000_000
    assert settings.overrides == (("status.listen", LISTEN), ("state.directory", DIRECTORY))
    assert settings.file == config


@pytest.mark.parametrize("environ", [{}, {LISTEN: "", DIRECTORY: ""}, {"SCHEDULED_EVENTS_BRIDGE_VM_NAME": "node"}])
def test_unset_empty_and_unrelated_variables_change_nothing(config, environ):
    settings = load(config, environ)
    assert (settings, settings.overrides) == (load(config), ())


def test_invalid_value_is_reported_for_its_key(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("stop_grace_seconds = -1\n")
    with pytest.raises(ConfigurationError) as caught:
        load(path, {LISTEN: "everywhere"})
    assert [each.partition(" ")[0] for each in caught.value.mistakes] == ["stop_grace_seconds", "status.listen"]


def test_help_names_every_variable():
    said = CliRunner().invoke(commands, ["--help"]).output
    assert all(f"${variable}" in said for variable in OVERRIDES)
