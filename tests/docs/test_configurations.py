"""The configurations that the two pages show: each is read as the agent reads it, and the drain script works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bridge.config.loader import read
from bridge.sink import ENVIRONMENT_PREFIX, Transition, environment_of
from bridge.testing.records import sample_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
KEYS = (ROOT / "sinks" / "README.md").read_text(encoding="utf-8").partition("## The keys of the sinks")[2]
PROGRAM = "/usr/local/bin/on-scheduled-event"


def _fenced(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _sinks_after(words):
    """Return name -> settings of each sink in the first configuration of the README after *words*."""
    block = _fenced("toml", README.partition(words)[2])[0]
    return {sink.name: sink for sink in read(tomllib.loads(block)).sinks}


def test_fleet_logging_goes_to_event_hubs_by_managed_identity():
    (sink,) = _sinks_after("**Fleet logging**").values()
    config = sink.config
    assert (sink.type_name, config.credential, config.client_id) == ("eventhubs", "managed_identity", None)


def test_fleet_logging_works_over_https_as_the_page_says():
    text = _fenced("toml", README.partition("**Fleet logging**")[2])[0]
    (sink,) = read(tomllib.loads(text + 'transport = "https"\n')).sinks
    assert sink.config.transport == "https"


def test_alerts_go_to_alertmanager_and_pagerduty():
    sinks = _sinks_after("**Alerts**")
    assert {(sink.type_name, sink.config.format) for sink in sinks.values()} == {
        ("webhook", "alertmanager"),
        ("webhook", "pagerduty"),
    }


def test_an_eviction_does_not_wait_behind_a_drain():
    sinks = _sinks_after("**A drain script**")
    prepare, leave = sinks["prepare"].config, sinks["leave"].config
    assert set(leave.event_types) == {"Preempt", "Terminate"}
    assert leave.timeout_seconds < 30 < prepare.timeout_seconds


@pytest.mark.parametrize("words", ["**Fleet logging**", "**Alerts**", "**A drain script**"])
def test_sinks_of_the_readme_can_be_built(words):
    for settings in _sinks_after(words).values():
        settings.build().close()


@pytest.mark.parametrize("block", _fenced("toml", KEYS))
def test_configuration_of_the_sinks_page_is_right(block):
    for settings in read(tomllib.loads(block)).sinks:
        settings.build().close()


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_drain_script_drains_and_undrains(tmp_path):
    log = tmp_path / "log"
    _write_program(tmp_path / "on-scheduled-event", _fenced("sh", KEYS)[0])
    for name in ("drain-node", "undrain-node"):
        _write_program(tmp_path / name, f'#!/bin/sh\necho "{name} $*" >> "{log}"\n')
    text = _fenced("toml", README.partition("**A drain script**")[2])[0].replace(
        PROGRAM, f"{tmp_path}/on-scheduled-event"
    )
    for settings in read(tomllib.loads(text)).sinks:
        config = settings.config
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        sink = settings.sink_class(type(config)(**{**_keys(config), "environment": path}))
        for number, transition in enumerate(config.transitions):
            sink.send([sample_record(number, transition=Transition(transition))])
        sink.close()
    when = "--until 2026-11-20T11:15:00Z"
    assert log.read_text().splitlines() == [
        f"drain-node {when}",
        "drain-node --now",
        "undrain-node ",
        "undrain-node ",
        "undrain-node ",
        f"drain-node --now {when}",
    ]


def _keys(config):
    return {name: getattr(config, name) for name in config.__struct_fields__}


def _write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_every_variable_of_the_command_sink_is_listed_and_no_other():
    listed = KEYS.partition(f"`{ENVIRONMENT_PREFIX}` followed by")[2].partition("\n\nIt inherits")[0]
    assert [ENVIRONMENT_PREFIX + name for name in re.findall(r"`(\w+)`", listed)] == list(
        environment_of(sample_record())
    )
