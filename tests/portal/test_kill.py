"""After a kill, the portal has every acknowledged record and decision, and an audit chain without gaps."""

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from fleet_records import fleet_record, vm_id_of
from portal_databases import audit_fault
from portal_kit import READER_TOKEN, poll
from portal_pair import bring, send
from portal_process import PortalProcess
from signers import Signer
from waiting import until

from bridge.portal.fleet import key_of_event_id
from bridge.portal.pending_decisions import MAX_DECISIONS
from bridge.portal.store.database import Store
from bridge.portal.store.decisions import NewDecision, insert_decisions

AS_READER = {"Authorization": f"Bearer {READER_TOKEN}"}


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def killable(tmp_path, signer):
    portal = PortalProcess(tmp_path, {"keys": [signer.table()]})
    portal.start()
    yield portal
    portal.kill()


def _work(portal, signer, stop, kept):
    """Send records and decisions until *stop*, and add the acknowledged ones to *kept*."""
    number = len(kept["records"])
    with contextlib.suppress(requests.RequestException):
        while not stop.is_set():
            number += 1
            about = {"event_id": f"E-{number}", "sequence": number, "seconds": number}  # newest first
            records = [fleet_record(vm, **about) for vm in range(5)]
            if send(portal.url, records).status_code == 204:
                kept["records"] += [record.id for record in records]
            token = signer.sign(vm_id_of(number % 3))
            answer = bring(portal.url, token)
            if answer.status_code == 200:
                kept["decisions"][token] = answer.json()["decisions"][0]["index"]


def _decisions(portal, vm):
    """Return all decisions for *vm*. A response contains at most 1,000, so the function polls repeatedly."""
    index, told = 0, []
    while len(told) % MAX_DECISIONS == 0:
        answer = poll(portal.url, vm, index=index)
        if not answer["decisions"]:
            break
        told += answer["decisions"]
        index = answer["index"]
    return told


def _check(portal, database, kept):
    with contextlib.closing(Store.of_file(database)) as store:
        found = store.read(lambda opened: opened.exec_driver_sql("SELECT record_id FROM records").scalars().all())
        assert audit_fault(store) is None
    assert set(kept["records"]) <= set(found)
    assert set(kept["decisions"]) <= {each for vm in range(3) for each in _decisions(portal, vm)}
    assert len(set(kept["decisions"].values())) == len(kept["decisions"])
    events = requests.get(f"{portal.url}/events?limit=500&state=all", headers=AS_READER, timeout=20).json()["events"]
    seen = {vm["record_id"] for event in events for vm in event["vms"]}
    assert set(kept["records"][-1000:]) <= seen


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(2, id="few"), pytest.param(100, id="many", marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_kill_loses_no_acknowledged_record_or_decision(killable, signer, tmp_path, rounds):
    kept = {"records": [], "decisions": {}}
    for number in range(rounds):
        stop = threading.Event()
        worker = threading.Thread(target=_work, args=(killable, signer, stop, kept))
        worker.start()
        time.sleep(0.2 + 0.37 * number % 0.8)
        killable.kill()
        stop.set()
        worker.join()
        killable.start()
        _check(killable, tmp_path / "portal.db", kept)
    assert len(kept["records"]) > 0
    assert len(kept["decisions"]) > 0


def test_decision_stored_just_before_a_kill_is_delivered_after_the_restart(killable, signer, tmp_path):
    token = signer.sign()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(poll, killable.url, index=1, wait=60)
        metrics = f"{killable.operator_url}/metrics"
        until(lambda: "held_polls 1.0" in requests.get(metrics, timeout=20).text)
        with contextlib.closing(Store.of_file(tmp_path / "portal.db")) as store:
            numbers = store.write(_stop_and_insert, killable, _stored(token))
        assert list(numbers.values()) == [2]
        killable.kill()
        with pytest.raises(requests.ConnectionError):
            waiting.result(30)
    killable.start()
    answer = poll(killable.url, index=1, wait=60)
    assert (answer["index"], answer["decisions"]) == (2, [token])


def _stop_and_insert(connection, portal, decision):
    """Stop *portal* while this transaction has the write lock, because a stopped process never releases the lock.

    No poll completes between the commit and the kill.
    """
    portal.signal(signal.SIGSTOP)
    return insert_decisions(connection, [decision], at="2026-11-20T11:00:30.000Z")[0]


def _stored(token):
    return NewDecision(
        vm_key=vm_id_of(0),
        event_key=key_of_event_id("A"),
        decision="approve",
        jws=token,
        issued_at_seconds=0.0,
        expires_at_seconds=int(time.time()) + 3600,
    )
