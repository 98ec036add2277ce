"""Sink types: found by entry point or by module:Class, and never imported unasked."""

from __future__ import annotations

import sys
from pathlib import Path

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
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An importable module with a name of this test's own, and a distribution with entry points beside it."""
    name = f"acme_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(SINK)
    (tmp_path / f"{name}_lonely.py").write_text("import acme_sdk_that_is_nowhere\n")
    (tmp_path / f"{name}_broken.py").write_text("1 / 0\n")
    points = [f"acme-good = {name}:Good [extra]", f"acme-trap = {name}_broken:Good"]
    distribution(tmp_path, "acme", points)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def distribution(folder: Path, name: str, points: list[str]) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points]))


def message(type_name: str, kind: type[ConfigurationError] = ConfigurationError) -> str:
    with pytest.raises(kind) as caught:
        sink_class(type_name)
    return str(caught.value)


@pytest.mark.usefixtures("package")
def test_own_and_foreign_sinks_come_by_the_same_road() -> None:
    assert {"stdout", "acme-good", "acme-trap"} <= set(installed())
    assert list(installed()) == sorted(installed())
    assert issubclass(sink_class("acme-good"), Sink)


def test_module_and_class_need_no_packaging(package: str) -> None:
    assert sink_class(f"{package}:Good").__name__ == "Good"


def test_listing_and_choosing_import_no_other_sink(package: str) -> None:
    installed()
    sink_class("acme-good")
    assert f"{package}_broken" not in sys.modules


@pytest.mark.parametrize("odd", [":", "acme:", "a:b:c", "../x:C"])
def test_odd_type_names_get_a_sentence(odd: str) -> None:
    assert "Installed:" in message(odd, ConfigurationError) or "'module:Class'" in message(odd, ConfigurationError)


@pytest.mark.parametrize("wrong", ["http://h/hunter2", "stdout --token hunter2"])
def test_type_that_may_hold_a_secret_is_not_repeated(wrong: str) -> None:
    assert "hunter2" not in message(wrong, ConfigurationError)


def test_missing_module_class_and_misspelling_are_told_apart(package: str) -> None:
    assert "the module 'nowhere_at_all' does not exist" in message("nowhere_at_all.sinks:Good", ConfigurationError)
    assert "Did you mean 'Good'?" in message(f"{package}:Goood", ConfigurationError)


def test_missing_package_is_named(package: str) -> None:
    assert "the module 'acme_sdk_that_is_nowhere' does not exist" in message(f"{package}_lonely:Good")


@pytest.mark.usefixtures("package")
def test_module_that_raises_is_quoted() -> None:
    assert "ZeroDivisionError: division by zero" in message("acme-trap")


def test_class_that_is_no_sink_and_config_that_is_no_struct_are_refused(package: str) -> None:
    assert "not a subclass of bridge.sink.Sink" in message(f"{package}:Plain")
    assert "Make it a frozen subclass of bridge.sink.SinkConfig" in message(f"{package}:BadConfig")
