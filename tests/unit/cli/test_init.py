"""`init` prints a configuration, or writes it to a new file."""

import pytest
from click.testing import CliRunner

from bridge.cli.commands import commands
from bridge.cli.init import init, recipe_names
from bridge.config.loader import load
from bridge.errors import BridgeError


def run(*arguments):
    return CliRunner().invoke(commands, ["init", *arguments], standalone_mode=False, catch_exceptions=True)


def test_sinks_keep_the_order_of_the_options(tmp_path):
    result = run("--sink", "webhook:pagerduty", "--sink", "eventhubs")
    (tmp_path / "c.toml").write_text(result.output)
    assert [sink.name for sink in load(tmp_path / "c.toml").sinks] == ["pagerduty", "eventhubs"]


def test_default_sink_is_stdout(tmp_path):
    (tmp_path / "c.toml").write_text(run().output)
    assert [sink.type_name for sink in load(tmp_path / "c.toml").sinks] == ["stdout"]


def test_init_creates_a_file_and_never_overwrites_a_file(tmp_path):
    file = tmp_path / "c.toml"
    init(["stdout"], file)
    text = file.read_text()
    with pytest.raises(BridgeError, match="File exists"):
        init(["eventhubs"], file)
    assert file.read_text() == text


@pytest.mark.parametrize("wrong", ["slack", "webhook:slak"])
def test_unknown_recipe_suggests_the_nearest_name(wrong):
    result = run("--sink", wrong)
    assert "webhook:slack" in str(result.exception)
    assert "Did you mean" in str(result.exception)


def test_list_names_each_recipe_on_a_line():
    assert "webhook:teams" in run("--list").output.splitlines()


@pytest.mark.parametrize("name", recipe_names())
def test_comments_fit_eighty_columns(name):
    lines = run("--sink", name).output.splitlines()
    assert [line for line in lines if "#" in line and "://" not in line and len(line) > 80] == []
