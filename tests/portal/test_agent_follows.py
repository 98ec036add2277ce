"""End to end: agents report an event to the portal, a user decides, an agent follows, and Azure starts the event."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import doc_pages
import msgspec
import pytest
import requests
from fleet_records import fleet_record
from portal_kit import AGENT_TOKEN, READER_TOKEN, RunningPortal, attested_table
from portal_pair import bring
from signers import Signer
from waiting import until

from bridge.events.event import ScheduledEvent
from bridge.testing import EventSpec, Simulator

VMS = ("vm_0", "vm_1")


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def portal(tmp_path, signer, azure):
    attested = attested_table(azure, tmp_path)
    with RunningPortal(tmp_path / "portal", keys=[signer.table()], agents={"attested": attested}) as running:
        yield running


@pytest.fixture
def azure():
    with Simulator(vms=list(VMS), rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def agents(request, tmp_path, portal, azure, signer):
    """The agents of both VMs, as processes, with a shared token from a file or with attested tokens."""
    (tmp_path / "token").write_text(f"{AGENT_TOKEN}\n", encoding="utf-8")
    (tmp_path / "token").chmod(0o600)
    agent_env, processes = request.getfixturevalue("agent_env"), []
    for vm in VMS:
        config = tmp_path / f"{vm}.toml"
        config.write_text(
            _agent(tmp_path, vm, azure.endpoints[vm], portal.url, signer.pair, way=request.param), encoding="utf-8"
        )
        config.chmod(0o600)
        log = (tmp_path / f"{vm}.log").open("w", encoding="utf-8")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "bridge", "run", "--config", str(config), "--allow-second-agent"],
                env=agent_env,
                stderr=log,
            )
        )
        log.close()
    yield processes
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        assert process.wait(30) == 0


def _agent(directory, vm, endpoint, url, pair, *, way):
    token = json.dumps(str(directory / "token"))
    shown = ('credential = "attested"',) * 2
    if way == "token":
        shown = (f"bearer_token_file = {token}", f"token_file = {token}")
    return "\n".join(
        [
            f"[imds]\nendpoint = {json.dumps(endpoint)}\npoll_interval_seconds = 0.2",
            f"[state]\ndirectory = {json.dumps(str(directory / f'state-{vm}'))}",
            '[status]\nlisten = ""',
            f'[[sinks]]\ntype = "webhook"\nname = "portal"\nscope = "all"\nurl = "{url}/records"',
            shown[0],
            f'[approval]\n[approval.remote]\nurl = "{url}"\n{shown[1]}\nwait_seconds = 30',
            f'[[approval.remote.keys]]\nkid = "ops"\napprover = "ada"\npublic_key_file = "{pair.public_key_file}"',
        ]
    )


def shown(portal, event_id):
    answer = portal.get(f"/events/{event_id}")
    return answer.json()["event"] if answer.status_code == 200 else None


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("agents", ["token", "attested"], indirect=True)
def test_agent_follows_a_decision_and_the_portal_shows_the_outcome(portal, azure, signer):
    event_id = azure.world.add_event(EventSpec(event_type="Freeze", resources=VMS, notice_seconds=3600))
    until(lambda: len((shown(portal, event_id) or {"vms": ()})["vms"]) == 2, seconds=60)
    event = shown(portal, event_id)
    assert (event["state"], event["unconfirmed"]) == ("scheduled", [])
    assert all(vm["agrees"] for vm in event["vms"])
    about = msgspec.convert(event["event"], ScheduledEvent)
    assert bring(portal.url, signer.sign(event["vms"][0]["vm"]["vm_id"], event=about)).status_code == 200
    until(lambda: shown(portal, event_id)["state"] == "started", seconds=60)
    assert [each.event_id for each in azure.world.approvals] == [event_id]
    outcomes = until(
        lambda: [each for each in portal.get("/audit").json()["entries"] if each["action"] == "outcome_approved"]
    )
    assert [(each["actor"], each["details"]["approval"]["result"]) for each in outcomes] == [("ada", "accepted")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_documented_commands_sign_and_send_a_decision(portal, signer, tmp_path, agent_env):
    script = doc_pages.marked(doc_pages.page("docs/howto/portal.md"), "portal: decide")
    [event_id] = set(re.findall(r"events/([0-9A-F-]{36})", script))
    [vm_id] = set(re.findall(r"vm_id=([0-9a-f-]{36})", script))
    record = fleet_record(0, event_id=event_id)
    portal.send(msgspec.structs.replace(record, vm=msgspec.structs.replace(record.vm, vm_id=vm_id)))
    here = {
        "http://127.0.0.1:8443/api/v1": portal.url,
        "$(cat readers.token)": READER_TOKEN,
        "--key ops-2026.key": f"--key {signer.pair.private_key_file}",
        "--kid ops-2026 --approver portal": "--kid ops --approver ada",
    }
    for shown_there, found in here.items():
        assert shown_there in script
        script = script.replace(shown_there, found)
    program = tmp_path / "scheduled-events-bridge"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bridge "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{agent_env['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=tmp_path,
        env={**agent_env, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decisions"][0]["index"] == 2
    headers = {"Authorization": f"Bearer {AGENT_TOKEN}"}
    asked = requests.get(f"{portal.url}/vms/{vm_id}/decisions?index=0&wait=1", headers=headers, timeout=20)
    assert len(asked.json()["decisions"]) == 1
