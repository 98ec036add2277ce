"""Notifications of portal processes that are killed, run together, or have a silent webhook."""

import random
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
import slow_peer
from fleet_records import fleet_record
from portal_kit import RunningPortal
from portal_pair import send
from portal_process import PortalProcess
from slow_peer import SlowPeer
from waiting import until
from webhook_receiver import ORIGIN, WebhookReceiver

from bridge.portal.schema import notifications

WAIT_SECONDS = 30
ROUNDS = [
    pytest.param(6, id="few"),
    pytest.param(150, id="many", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


def _tables(url, database):
    target = {"name": "ops", "url": url, "kinds": ["undecided"]}
    return {"notify": [target], "people": {"origin": ORIGIN}, "database": database.table}


def _announced(event_id, sequence, **listed):
    at = (datetime.now(timezone.utc) + timedelta(minutes=5)).replace(microsecond=0)
    raw = format_datetime(at, usegmt=True)
    return [
        fleet_record(vm, event_id=event_id, sequence=sequence, not_before=at, not_before_raw=raw, **listed)
        for vm in (0, 1)
    ]


def _rows(store):
    return store.read(lambda connection: connection.execute(notifications.select()).all())


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_killed_process_loses_no_notification(tmp_path, database, rounds):
    store, chance = database.store(), random.Random(7)
    kill_in_request, requested = threading.Event(), threading.Event()

    def before_answer():
        if kill_in_request.is_set():
            kill_in_request.clear()
            process.kill()
        requested.set()

    with WebhookReceiver(before_answer=before_answer) as receiver:
        process = PortalProcess(tmp_path, _tables(receiver.url, database))
        ids = {}
        try:
            for number in range(rounds):
                process.start()
                requested.clear()
                if number % 3 == 0:
                    kill_in_request.set()
                assert (
                    send(process.url, _announced(f"E-{number}", number + 1, active=(f"E-{number}",))).status_code == 204
                )
                if number % 3 == 0:  # the webhook has the notification, and the portal has no answer
                    assert requested.wait(WAIT_SECONDS)
                elif number % 3 == 1:  # the portal has just stored the notification
                    until(lambda count=number + 1: len(_rows(store)) == count)
                else:
                    time.sleep(chance.uniform(0, 2.5))
                process.kill()
                requested.clear()
                store.write(lambda connection: connection.execute(notifications.update().values(due_at="2026")))
                process.start()
                until(lambda count=number + 1: len([row for row in _rows(store) if row.is_done]) == count)
                process.kill()
                while not receiver.received.empty():
                    headers, body = receiver.received.get()
                    ids.setdefault(headers["webhook-id"], []).append(body)
        finally:
            process.kill()
    assert sorted(ids) == sorted(row.notification_id for row in _rows(store))
    assert len(ids) == rounds
    assert all(len(found) <= 2 for found in ids.values())
    assert len(ids) < sum(map(len, ids.values()))  # the kills during a request


def test_a_silent_webhook_delays_neither_records_nor_the_stop(tmp_path, database):
    peer = SlowPeer(slow_peer.silent)
    with WebhookReceiver() as receiver:
        tables = _tables(receiver.url, database)
        tables["notify"].append({"name": "silent", "url": peer.url})
        with RunningPortal(tmp_path, **tables) as portal:
            portal.send(*_announced("A", 1))
            until(lambda: peer.accepted)
            portal.send(*_announced("B", 2))
            assert receiver.received.get(timeout=WAIT_SECONDS)
            until(lambda: 'notifications_total{result="sent",target="ops"} ' in portal.metrics())
    peer.close()
