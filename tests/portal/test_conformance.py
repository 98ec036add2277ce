"""The portal meets every requirement of the conformance kit, and accepts decisions of `decide --all`."""

import io
from contextlib import redirect_stdout
from functools import partial

import pytest
import requests
from fleet_records import fleet_record
from portal_kit import AGENT_TOKEN, RunningPortal, attested_table, poll
from portal_pair import bring
from signers import Signer

from bridge.cli.decide import print_decisions
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.config.settings import ImdsSettings
from bridge.config.trusted_keys import TrustedKey
from bridge.imds.client import attested_document
from bridge.testing import Simulator
from bridge.testing.portal_check.check import CheckSettings, Decider, check_portal
from bridge.testing.portal_check.report import Result
from bridge.testing.portal_check.requirements import Requirement

BY_A_DOCUMENT = {
    *(Requirement.RECORD_OF_OTHERS, Requirement.OTHER_VM, Requirement.CHALLENGE, Requirement.TOKEN),
    *(Requirement.NO_DOCUMENT, Requirement.DOCUMENT_SIZE, Requirement.TAMPERED, Requirement.REPLAYED),
    Requirement.REFUSAL,
}
VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def portal(tmp_path, signer):
    with RunningPortal(tmp_path / "portal", keys=[signer.table()]) as running:
        yield running


def test_portal_meets_every_requirement_of_the_protocol(portal, signer, tmp_path):
    (tmp_path / "token").write_text(f"{AGENT_TOKEN}\n")
    unused = (KeySettings(kid="unused", approver="unused", public_key_file="unused"),)

    def decide(verdict, record):
        answer = bring(portal.url, signer.sign(record.vm.vm_id, event=record.event, decision=verdict))
        assert answer.status_code == 200, answer.text

    report = check_portal(
        CheckSettings(
            remote=RemoteSettings(url=portal.url, token_file=str(tmp_path / "token"), wait_seconds=3, keys=unused),
            vm_id=VM_ID,
            keys=(TrustedKey(**signer.table()),),
            records_url=f"{portal.url}/records",
            decider=Decider(decide=decide, is_command=True, timeout_seconds=60),
        )
    )
    assert [
        (each.requirement.key, each.detail, each.asked, each.answered)
        for each in report.findings
        if each.result is not Result.MET and each.requirement not in BY_A_DOCUMENT
    ] == []


@pytest.mark.parametrize("nonce", ["required", "preferred"])
def test_portal_meets_every_requirement_for_attested_tokens(tmp_path, nonce):
    unused = (KeySettings(kid="unused", approver="unused", public_key_file="unused"),)
    with Simulator(vms=["vm_0"], rate_limit=False) as azure:
        attested = {**attested_table(azure, tmp_path), "nonce": nonce}
        imds = ImdsSettings(endpoint=azure.endpoints["vm_0"], timeout_seconds=10.0)
        with RunningPortal(tmp_path / "portal", agents={"attested": attested}) as portal:
            remote = RemoteSettings(url=portal.url, credential="attested", wait_seconds=3, keys=unused)
            report = check_portal(
                CheckSettings(
                    remote=remote,
                    vm_id=azure.machines[0].vm_id,
                    records_url=f"{portal.url}/records",
                    document=partial(attested_document, imds),
                )
            )
    found = {each.requirement: each for each in report.findings}
    assert [(each.key, finding.detail) for each, finding in found.items() if finding.result is Result.NOT_MET] == []
    others = {each for each in BY_A_DOCUMENT if found[each].result is not Result.MET}
    assert others == (set() if nonce == "required" else {Requirement.REPLAYED})


def sign_for_all(portal, signer, record):
    content = portal.get(f"/events/{record.event.event_id}/records").content
    printed = io.StringIO()
    with redirect_stdout(printed):
        print_decisions(
            io.BytesIO(content),
            event_id=None,
            vm_id=None,
            for_all=True,
            key=signer.pair.private_key_file,
            kid="ops",
            approver="ada",
            decision="approve",
            reason=None,
            valid_seconds=600,
        )
    return printed.getvalue().split()


def test_decisions_signed_with_decide_all_reach_each_vm(portal, signer):
    records = [fleet_record(number) for number in range(3)]
    portal.send(*records)
    tokens = sign_for_all(portal, signer, records[0])
    assert requests.post(f"{portal.url}/decisions", json={"decisions": tokens}, timeout=20).ok
    for vm in range(3):
        [token] = poll(portal.url, vm)["decisions"]
        assert token in tokens
