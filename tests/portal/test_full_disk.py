"""A full disk: the portal rejects records and decisions that it cannot store, and accepts them again later."""

import pytest
import requests
from fleet_records import fleet_record
from portal_kit import BATCH, RunningPortal, batch, poll
from portal_pair import bring
from signers import Signer
from small_disk import small_disk
from waiting import until


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk:
        yield disk


def told(portal):
    return poll(portal.url)["decisions"]


def test_decision_is_not_delivered_if_a_full_disk_prevents_its_storage(disk, tmp_path):
    signer = Signer(tmp_path)
    running = RunningPortal(
        tmp_path / "state", keys=[signer.table()], database={"file": str(disk.path / "state" / "portal.db")}
    )
    with running as portal:
        tokens = [signer.sign(reason="x" * 200) for _ in range(200)]
        stored = [tokens.pop()]
        assert bring(portal.url, stored[0]).status_code == 200
        disk.fill()
        while (answer := bring(portal.url, tokens[-1])).status_code == 200:  # until the journal is full
            stored.append(tokens.pop())
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert sorted(told(portal)) == sorted(stored)
        many = batch(fleet_record(vm, event_id="full") for vm in range(300))
        assert portal.post(many, content_type=BATCH).status_code == 503
        assert portal.get("/events/full").status_code == 404
        ready = requests.get(f"{portal.operator_url}/readyz", timeout=20)
        assert (ready.status_code, "disk is full" in ready.json()["why"]) == (503, True)
        disk.free()
        assert bring(portal.url, tokens[-1]).status_code == 200
        assert portal.post(many, content_type=BATCH).status_code == 204
        stored.append(tokens.pop())
        assert sorted(told(portal)) == sorted(stored)
    with running as portal:
        assert sorted(told(portal)) == sorted(stored)
        assert len(portal.get("/events/full").json()["event"]["vms"]) == 300


@pytest.mark.long
def test_idle_portal_is_not_ready_while_the_disk_is_full(disk, tmp_path):
    def status():
        return requests.get(f"{portal.operator_url}/readyz", timeout=20).status_code

    with RunningPortal(tmp_path / "state", database={"file": str(disk.path / "state" / "portal.db")}) as portal:
        assert status() == 200
        disk.fill()
        until(lambda: status() == 503, seconds=60)
        disk.free()
        until(lambda: status() == 200, seconds=60)
