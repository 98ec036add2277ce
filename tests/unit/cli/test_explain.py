"""`explain`: every table and key of the configuration, by its path, from the code that reads it."""

from __future__ import annotations

import msgspec
import pytest

from bridge.cli.explain import explain
from bridge.config.reference import Key, Table, find, keys_of, paths, tables, toml_value
from bridge.config.sinks import installed, sink_class
from bridge.errors import BridgeError


@pytest.mark.parametrize("path", paths())
def test_every_path_is_found_and_says_something(path):
    found = find(path)
    assert isinstance(found, Table | Key)
    assert found.path == path
    assert len(found.text) > len("The zone.")


def test_every_key_of_every_sink_is_there():
    for name in installed():
        for field in sink_class(name).Config.__struct_fields__:
            assert isinstance(find(f"sinks.{name}.{field}"), Key), (name, field)


def test_key_says_what_it_takes_its_default_and_its_meaning(capsys):
    explain("imds.timeout_seconds")
    said = capsys.readouterr().out
    assert said.startswith("imds.timeout_seconds  (a number above 0; default 5.0)\n")
    assert "in seconds" in said


def test_required_key_says_so(capsys):
    explain("sinks.file.path")
    assert "required" in capsys.readouterr().out


def test_key_of_a_sink_that_all_have_is_explained_there_too(capsys):
    explain("sinks.webhook.scope")
    assert capsys.readouterr().out.startswith("sinks.scope ")


def test_default_of_a_sink_of_its_own_goes_before_the_common_one(capsys):
    explain("sinks.eventhubs.max_batch")
    assert "default 100" in capsys.readouterr().out


def test_table_lists_its_keys_and_where_the_others_are(capsys):
    explain("[sinks.command]")
    said = capsys.readouterr().out
    assert 'type = "command"' in said
    assert "sinks.command.command" in said
    assert said.rstrip().endswith("explain sinks")


def test_alone_it_lists_every_table(capsys):
    explain(None)
    said = capsys.readouterr().out
    assert all(f"\n{table.path} " in f"\n{said}" for table in tables() if table.path)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("url", "sinks.webhook.url"),
        ("imds.timeout_secs", "imds.timeout_seconds"),
        ("poll_intervall_seconds", "poll_interval_seconds"),
    ],
)
def test_key_that_there_is_not_is_answered_with_the_nearest(wrong, hint):
    with pytest.raises(BridgeError, match=hint):
        explain(wrong)


def test_values_are_shown_as_toml_has_them():
    assert toml_value(('a "b"', 1, True)) == '["a \\"b\\"", 1, true]'
    assert toml_value({}) == "{}"
    assert toml_value({"a": 1.5}) == "{ a = 1.5 }"


def test_field_without_a_default_is_required_and_one_of_none_is_optional():
    class Some(msgspec.Struct):
        need: str
        """Needed."""
        may: int | None = None
        """Not needed."""

    assert [key.default for key in keys_of(Some, "x.")] == [None, ""]
