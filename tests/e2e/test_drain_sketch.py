"""The drain script of the sinks page with an agent process. The script never undrains a VM during an impact.

The tests play the scenarios of Microsoft's mock server, which assigns a new EventId to each status, and an event that
ends during another event. MOCK_SCENARIOS=all plays all twelve scenarios. The default is two scenarios.
"""

import itertools
import json
import os
import re
import shutil
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from imds_documents import document, event
from mock_server import NOTICE, SCENARIOS, VM, MockServer

if sys.platform == "win32":
    pytest.skip("a shell script", allow_module_level=True)
if shutil.which("jq") is None:
    pytest.skip("jq is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "sinks.md"
PROGRAM = "/usr/local/bin/on-scheduled-event"
ONE_TABLE = f'[[sinks]]\ntype = "command"\ncommand = ["{PROGRAM}"]\n'
TABLES_OF_THE_README = (ROOT / "docs" / "howto" / "drain-script.md").read_text().split("```")[1][len("toml") :]
_FEW = {"Live Migration - Dev Timing", "Canceled Maintenance - Dev Timing"}
PLAYED = [each for each in SCENARIOS if os.environ.get("MOCK_SCENARIOS") == "all" or each.name in _FEW]


@pytest.fixture
def drained(request, agent, imds, tmp_path):
    """Start an agent that runs the documented script for each record. Return a function that lists the runs."""
    log, path = tmp_path / "drains", f"{tmp_path}:/usr/bin:/bin"
    imds.identity = (200, f'{{"name": "{VM}", "vmId": "AAAA"}}'.encode())
    [sketch] = re.findall(r"^```sh\n(#!/bin/sh\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    scripts = {
        "on-scheduled-event": sketch,
        "drain-node": f'#!/bin/sh\necho drain >> "{log}"\n',
        "undrain-node": f'#!/bin/sh\necho undrain >> "{log}"\n',
        "scheduled-events-bridge": f'#!/bin/sh\nexec "{sys.executable}" -m bridge "$@"\n',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    agent.env.update(PATH=path, SCHEDULED_EVENTS_BRIDGE_CONFIG=str(agent.config))
    tables = getattr(request, "param", ONE_TABLE)
    agent.configure(imds.url, tables.replace(PROGRAM, f"{tmp_path}/on-scheduled-event"))
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.start()
    # Without a stored document, the agent does not know all events for five minutes.
    imds.wait_for_polls(2)
    assert agent.stop() == 0
    agent.start()
    return lambda: log.read_text().split() if log.exists() else []


def show(agent, imds, drained, document, *, until):
    """Serve *document* until *until* is the last program that ran. Return the programs that ran."""
    before = len(drained())
    imds.show(document)
    agent.wait_for(lambda: drained()[before:][-1:] == [until])
    return drained()[before:]


def test_vm_stays_drained_during_the_impact_of_each_mock_server_event(agent, imds, drained):
    server, last = MockServer(), "undrain"
    for scenario in PLAYED:
        # With the times of Azure, the impact begins just after NotBefore.
        notice = timedelta(0) if scenario.is_dev_timing or scenario.is_canceled else NOTICE - timedelta(seconds=1)
        for status, _, shown in server.play(scenario, datetime.now(timezone.utc) - notice):
            if status == "Chosen":
                imds.show(shown)
                continue
            until = "undrain" if status == "Over" else "drain"
            programs = show(agent, imds, drained, shown, until=until)
            # The mock server gives each status its own EventId, so each of them has an ending that repeats "undrain".
            while programs[0] == last != until:
                del programs[0]
            assert programs == [until], (scenario, status)
            last = until
    assert agent.stop() == 0


def test_end_of_one_event_does_not_undrain_a_vm_during_another_event(agent, imds, drained):
    def freeze(incarnation, name, status):
        return document(incarnation, event(name, status, vm=VM))

    assert show(agent, imds, drained, freeze(2, "a", "Started"), until="drain") == ["drain"]
    assert show(agent, imds, drained, freeze(3, "b", "Started"), until="drain") == ["drain"]
    imds.show(freeze(3, "b", "Started"), polls=8)  # Five responses confirm the end of "a".
    assert "undrain" not in drained()
    assert show(agent, imds, drained, freeze(4, "b", "Completed"), until="undrain") == ["undrain"]
    assert agent.stop() == 0


@pytest.mark.parametrize("stale", [document(4), document(5), document(4, event("a", vm=VM))])
def test_stale_responses_do_not_run_the_script_again(agent, imds, drained, stale):
    started = document(5, event("a", "Started", vm=VM))
    assert show(agent, imds, drained, started, until="drain") == ["drain"]
    bodies = itertools.cycle(json.dumps(each).encode() for each in (stale, started))

    def alternate(handler):
        imds.body = next(bodies)
        imds.answer = None
        handler.do_GET()
        imds.answer = alternate

    imds.answer = alternate
    imds.wait_for_polls(40)
    imds.answer = None
    assert drained() == ["drain"]
    assert show(agent, imds, drained, document(6, event("a", "Completed", vm=VM)), until="undrain") == ["undrain"]
    assert agent.stop() == 0


@pytest.mark.parametrize("drained", [TABLES_OF_THE_README], indirect=True, ids=["tables of the readme"])
def test_canceled_eviction_after_another_event_ended_undrains_the_vm(agent, imds, drained):
    eviction = event("t", event_type="Terminate", vm=VM)
    imds.show(document(2, event("r", "Started", event_type="Reboot", vm=VM), eviction))
    agent.wait_for(lambda: len(drained()) >= 2)
    imds.show(document(3, eviction), polls=4)
    assert "undrain" not in drained()
    show(agent, imds, drained, document(4), until="undrain")
    assert agent.stop() == 0


def test_recommendation_neither_drains_a_vm_nor_keeps_it_drained(agent, imds, drained):
    risk = event("r", event_type="SpotRebalanceRecommendation", vm=VM)
    assert show(agent, imds, drained, document(2, risk, event("a", "Started", vm=VM)), until="drain") == ["drain"]
    assert show(agent, imds, drained, document(3, risk), until="undrain") == ["undrain"]
    assert drained() == ["drain", "undrain"]
    assert agent.stop() == 0
