"""After a kill, the portal has every acknowledged record and decision, and an audit chain without gaps."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from fleet_records import fleet_record, vm_id_of
from portal_kit import AGENT_TOKEN, BATCH, READER_TOKEN, batch, portal_table
from signers import Signer

from bridge.portal.audit import first_fault
from bridge.portal.fleet import key_of_event_id
from bridge.portal.pending_decisions import MAX_DECISIONS
from bridge.portal.store.audit import all_entries, count
from bridge.portal.store.database import Store
from bridge.portal.store.decisions import NewDecision, insert_decisions

AS_AGENT = {"Authorization": f"Bearer {AGENT_TOKEN}"}
AS_READER = {"Authorization": f"Bearer {READER_TOKEN}"}


class Killable:
    """A portal as a process."""

    def __init__(self, directory, env, signer):
        self._env = env
        self.directory = directory
        self.config = directory / "portal.toml"
        lines = []
        for name, table in portal_table(directory, keys=[signer.table()]).items():
            header, inner = (f"[[{name}]]", table[0]) if isinstance(table, list) else (f"[{name}]", table)
            lines += [header, *(f"{key} = {json.dumps(value)}" for key, value in inner.items())]
        self.config.write_text("\n".join(lines), encoding="utf-8")
        self.url = self.operator_url = ""

    def start(self):
        log = self.directory / f"log-{time.monotonic_ns()}"
        with log.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bridge", "portal", "--config", str(self.config), "--log-format", "text"],
                env=self._env,
                stderr=stream,
            )
        until = time.monotonic() + 30
        while not (found := re.search(r"url=(http://127.0.0.1:\d+)", log.read_text(encoding="utf-8"))):
            assert time.monotonic() < until, log.read_text(encoding="utf-8")
            time.sleep(0.02)
        self.url = f"{found[1]}/api/v1"
        self.operator_url = "http://127.0.0.1:" + re.search(r"operator=\D*127\.0\.0\.1\D+(\d+)", log.read_text())[1]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def killable(tmp_path, agent_env, signer):
    portal = Killable(tmp_path, agent_env, signer)
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
            headers = {**AS_AGENT, "Content-Type": BATCH}
            answer = requests.post(f"{portal.url}/records", data=batch(records), headers=headers, timeout=20)
            if answer.status_code == 204:
                kept["records"] += [record.id for record in records]
            token = signer.sign(vm_id_of(number % 3))
            answer = requests.post(f"{portal.url}/decisions", json={"decisions": [token]}, timeout=20)
            if answer.status_code == 200:
                kept["decisions"][token] = answer.json()["decisions"][0]["index"]


def _decisions(portal, vm_id):
    """Return all decisions for *vm_id*. A response contains at most 1,000, so the function polls repeatedly."""
    index, told = 0, []
    while len(told) % MAX_DECISIONS == 0:
        asked = requests.get(f"{portal.url}/vms/{vm_id}/decisions?index={index}&wait=1", headers=AS_AGENT, timeout=20)
        answer = asked.json()
        if not answer["decisions"]:
            break
        told += answer["decisions"]
        index = answer["index"]
    return told


def _check(portal, kept):
    store = Store.of_file(portal.directory / "portal.db")
    try:
        found = store.read(lambda opened: opened.exec_driver_sql("SELECT record_id FROM records").scalars().all())
        total = store.read(count)
        fault = store.read(lambda connection: first_fault(all_entries(connection), count=total))
    finally:
        store.close()
    assert set(kept["records"]) <= set(found)
    assert fault is None
    assert set(kept["decisions"]) <= {each for vm in range(3) for each in _decisions(portal, vm_id_of(vm))}
    assert len(set(kept["decisions"].values())) == len(kept["decisions"])
    events = requests.get(f"{portal.url}/events?limit=500&state=all", headers=AS_READER, timeout=20).json()["events"]
    seen = {vm["record_id"] for event in events for vm in event["vms"]}
    assert set(kept["records"][-1000:]) <= seen


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(2, id="few"), pytest.param(100, id="many", marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_kill_loses_no_acknowledged_record_or_decision(killable, signer, rounds):
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
        _check(killable, kept)
    assert len(kept["records"]) > 0
    assert len(kept["decisions"]) > 0


def test_decision_stored_just_before_a_kill_is_delivered_after_the_restart(killable, signer):
    token = signer.sign()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_ask, killable, index=1, wait=60)
        until = time.monotonic() + 30
        while "held_polls 1.0" not in requests.get(f"{killable.operator_url}/metrics", timeout=20).text:
            assert time.monotonic() < until
            time.sleep(0.02)
        store = Store.of_file(killable.directory / "portal.db")
        numbers = store.write(_stop_and_insert, killable.process, _stored(token))
        assert list(numbers.values()) == [2]
        store.close()
        killable.kill()
        with pytest.raises(requests.ConnectionError):
            waiting.result(30)
    killable.start()
    answer = _ask(killable, index=1, wait=60)
    assert (answer["index"], answer["decisions"]) == (2, [token])


def _stop_and_insert(connection, process, decision):
    """Stop *process* while this transaction has the write lock, because a stopped process never releases the lock.

    No poll completes between the commit and the kill.
    """
    process.send_signal(signal.SIGSTOP)
    return insert_decisions(connection, [decision], at="2026-11-20T11:00:30.000Z")[0]


def _ask(portal, *, index, wait):
    url = f"{portal.url}/vms/{vm_id_of(0)}/decisions?index={index}&wait={wait}"
    return requests.get(url, headers=AS_AGENT, timeout=wait).json()


def _stored(token):
    return NewDecision(
        vm_key=vm_id_of(0),
        event_key=key_of_event_id("A"),
        decision="approve",
        jws=token,
        issued_at_seconds=0.0,
        expires_at_seconds=int(time.time()) + 3600,
    )
