"""Sink types are found by entry point or by module:Class, and imported only when configured."""

import sys

import pytest

from bridge.config.sinks import GROUP, installed, sink_class
from bridge.errors import ConfigurationError
from bridge.sink import Sink

SINK = """
from bridge.sink import Sink

class Good(Sink):
    def send(self, batch):
        pass

class BadConfig(Good):
    Config = dict

class Plain:
    pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """An importable module with a unique name, and a distribution with entry points for it."""
    name = f"acme_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(SINK)
    (tmp_path / f"{name}_lonely.py").write_text("import acme_sdk_that_is_nowhere\n")
    (tmp_path / f"{name}_broken.py").write_text("1 / 0\n")
    points = [f"acme-good = {name}:Good [extra]", f"acme-trap = {name}_broken:Good"]
    distribution(tmp_path, "acme", points)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def distribution(folder, name, points):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points]))


def message(type_name, kind=ConfigurationError):
    with pytest.raises(kind) as caught:
        sink_class(type_name)
    return str(caught.value)


@pytest.mark.usefixtures("package")
def test_built_in_and_third_party_sinks_load_through_entry_points():
    assert {"stdout", "acme-good", "acme-trap"} <= set(installed())
    assert list(installed()) == sorted(installed())
    assert issubclass(sink_class("acme-good"), Sink)


def test_module_and_class_load_without_a_package(package):
    assert sink_class(f"{package}:Good").__name__ == "Good"


def test_listing_and_selecting_sinks_import_no_other_sink(package):
    installed()
    sink_class("acme-good")
    assert f"{package}_broken" not in sys.modules


@pytest.mark.parametrize("odd", [":", "acme:", "a:b:c", "../x:C"])
def test_malformed_type_name_is_rejected_with_the_valid_form(odd):
    assert "Installed:" in message(odd, ConfigurationError) or "'module:Class'" in message(odd, ConfigurationError)


@pytest.mark.parametrize("wrong", ["http://h/hunter2", "stdout --token hunter2"])
def test_type_that_may_contain_a_secret_is_not_shown(wrong):
    assert "hunter2" not in message(wrong, ConfigurationError)


def test_missing_module_class_and_typo_have_distinct_messages(package):
    assert "the module 'nowhere_at_all' does not exist" in message("nowhere_at_all.sinks:Good", ConfigurationError)
    assert "Did you mean 'Good'?" in message(f"{package}:Goood", ConfigurationError)


def test_missing_package_is_named(package):
    assert "the module 'acme_sdk_that_is_nowhere' does not exist" in message(f"{package}_lonely:Good")


@pytest.mark.usefixtures("package")
def test_error_of_the_module_is_quoted():
    assert "ZeroDivisionError: division by zero" in message("acme-trap")


def test_class_must_be_a_sink_and_its_config_a_struct(package):
    assert "not a subclass of bridge.sink.Sink" in message(f"{package}:Plain")
    assert "Make it a frozen subclass of bridge.sink.SinkConfig" in message(f"{package}:BadConfig")
