"""Checks the configurations of the documentation with the agent's parser, and runs the drain script."""

import re
import sys
from pathlib import Path

import doc_pages
import pytest

from bridge.config.loader import read
from bridge.sink import Transition
from bridge.testing.records import sample_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
KEYS = (ROOT / "docs" / "reference" / "sinks.md").read_text(encoding="utf-8")
PROGRAM = "/usr/local/bin/on-scheduled-event"


def _fenced(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _block_of(recipe):
    """Return the first configuration of the page *recipe*."""
    return _fenced("toml", (HOWTO / f"{recipe}.md").read_text(encoding="utf-8"))[0]


def _sinks_of(recipe):
    """Return the settings of each sink in this configuration by name."""
    return {sink.name: sink for sink in read(tomllib.loads(_block_of(recipe))).sinks}


def test_documented_eviction_sink_does_not_wait_for_the_drain_sink():
    sinks = _sinks_of("drain-script")
    prepare, leave = sinks["prepare"].config, sinks["leave"].config
    assert set(leave.event_types) == {"Preempt", "Terminate"}
    assert leave.timeout_seconds < 30 < prepare.timeout_seconds


@pytest.mark.parametrize("block", _fenced("toml", KEYS))
def test_configuration_of_the_sinks_page_is_valid(block):
    for settings in read(tomllib.loads(block)).sinks:
        settings.build().close()


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_drain_script_drains_and_undrains(tmp_path):
    log = tmp_path / "log"
    _write_program(tmp_path / "on-scheduled-event", doc_pages.marked(KEYS, "drain script"))
    for name in ("drain-node", "undrain-node"):
        _write_program(tmp_path / name, f'#!/bin/sh\necho "{name} $*" >> "{log}"\n')
    report = '{"active_event_ids":[],"events":[]}'
    _write_program(tmp_path / "scheduled-events-bridge", f"#!/bin/sh\necho '{report}'\n")
    text = _block_of("drain-script").replace(PROGRAM, f"{tmp_path}/on-scheduled-event")
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
