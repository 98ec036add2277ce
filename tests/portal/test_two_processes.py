"""Two portal processes on one PostgreSQL: a decision at one process immediately reaches agents at the other."""

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from fleet_records import fleet_record, vm_id_of
from portal_databases import audit_fault
from portal_kit import poll
from portal_pair import Pair, bring, say, send
from waiting import until

from bridge.portal.fleet import key_of_event_id
from bridge.portal.store.decisions import NewDecision, insert_decisions
from bridge.portal.users import COOKIE

AT = "2026-11-20T11:00:30.000Z"
KEY = key_of_event_id("A")
LISTENS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"


@pytest.fixture
def pair(tmp_path, postgresql_database):
    return Pair(tmp_path, postgresql_database)


@pytest.fixture
def portals(pair):
    with pair.portal("one") as one, pair.portal("other") as other:
        yield one, other


def seconds_to_wake(portal, decide):
    """Return the seconds until a poll at *portal* returns the decision of *decide*."""
    index = poll(portal.url)["index"]
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(poll, portal.url, index=index, wait=60)
        until(portal.held_polls)
        token = decide()
        began = time.monotonic()
        assert held.result(60)["decisions"] == [token]
        return time.monotonic() - began


def brought(portal, signer):
    token = signer.sign()
    assert bring(portal.url, token).status_code == 200
    return token


def cut(database, server):
    """Close every LISTEN connection, and return their number."""
    pids = [pid for (pid,) in server.sql(database, LISTENS)]
    for pid in pids:
        server.sql(database, f"SELECT pg_terminate_backend({pid})")
    return len(pids)


def test_closed_listen_connection_loses_no_decision(portals, pair, postgresql, postgresql_database):
    one, other = portals
    name = postgresql_database.name
    for _ in range(3):
        until(lambda: len(postgresql.sql(name, LISTENS)) == 2)

        def decide():
            assert cut(name, postgresql) == 2
            return brought(one, pair.signer)

        assert seconds_to_wake(other, decide) < 10


#: Commits a decision without NOTIFY, as if the notification were lost.
SILENT = (
    "WITH taken AS (UPDATE counters SET value = value + 1 WHERE name = 'decisions' RETURNING value) "
    "INSERT INTO decisions (decision_index, decision, vm_key, jws, jws_sha256, expires_at_seconds, made_at) "
    "SELECT value, 'approve', %s, %s, %s, %s, %s FROM taken"
)


def decided_silently(database, server, signer):
    token = signer.sign()
    row = (vm_id_of(0), token, hashlib.sha256(token.encode()).hexdigest(), 2**40, AT)
    server.sql(database.name, SILENT, *row)
    return token


def test_decision_without_a_notification_is_still_found(portals, pair, postgresql, postgresql_database):
    _, other = portals
    seconds = seconds_to_wake(other, lambda: decided_silently(postgresql_database, postgresql, pair.signer))
    assert seconds < 10


def test_decisions_wait_for_uncommitted_lower_indexes(portals, pair, postgresql_database):
    """Index n is committed after the request that receives n+1. No poll misses either decision."""
    one, other = portals
    slow, quick = pair.signer.sign(), pair.signer.sign()
    store = postgresql_database.store()
    taken, go_on = threading.Event(), threading.Event()

    def hold(connection):
        new = {"vm_key": vm_id_of(0), "event_key": KEY, "decision": "approve"}
        decision = NewDecision(**new, jws=slow, issued_at_seconds=0.0, expires_at_seconds=2**40)
        [number] = insert_decisions(connection, [decision], at=AT)[0].values()
        taken.set()
        assert go_on.wait(60)
        return number

    index = poll(one.url)["index"]
    with ThreadPoolExecutor(4) as pool:
        polls = [pool.submit(poll, portal.url, index=index, wait=60) for portal in portals]
        until(lambda: one.held_polls() and other.held_polls())
        first = pool.submit(store.write, hold)
        assert taken.wait(30)
        second = pool.submit(bring, other.url, quick)
        time.sleep(1)  # longer than a sweep: the second decision must not be visible yet
        assert not second.done()
        assert not any(each.done() for each in polls)
        go_on.set()
        number = first.result(30)
        # A request that waited too long for the lock is rejected, so the test sends it again.
        if second.result(30).status_code != 200:
            assert bring(other.url, quick).status_code == 200
        for held, portal in zip(polls, portals, strict=True):
            found = held.result(60)
            tokens = found["decisions"]
            if len(tokens) == 1:
                tokens += poll(portal.url, index=found["index"], wait=30)["decisions"]
            assert tokens == [slow, quick]
    assert number == index + 1


def digest(portal):
    return portal.get(f"/events/{KEY}").json()["event"]["digest"]


def test_approvals_at_two_processes_reach_agents_at_one_process(tmp_path, postgresql_database):
    pair = Pair(tmp_path / "two", postgresql_database, required=2)
    with pair.portal("one") as one, pair.portal("other") as other, ThreadPoolExecutor(2) as pool:
        assert send(one.url, [fleet_record(0)]).status_code == 204
        assert send(other.url, [fleet_record(1)]).status_code == 204
        index = poll(other.url)["index"]
        held = [pool.submit(poll, other.url, vm, index=index, wait=60, kids=["p1"]) for vm in (0, 1)]
        until(other.held_polls)

        first = say(one.url, "ann", "approve", key=KEY, digest=digest(one))
        assert (first.status_code, first.json()["outcome"], first.json()["needed"]) == (201, "waiting", 1)
        again = say(other.url, "ann", "approve", key=KEY, digest=digest(other))
        assert again.json()["outcome"] == "waiting"

        def approved():  # until this process has read that the agents poll the other
            answer = say(one.url, "bob", "approve", key=KEY, digest=digest(one))
            assert answer.status_code == 201 or "No agent would follow an approval" in answer.text, answer.text
            return answer.status_code == 201 and answer.json()["outcome"] == "approved"

        until(approved)
        for each in held:
            assert len(each.result(60)["decisions"]) == 1
        headers = {"Cookie": f"{COOKIE}=session-of-ann"}
        page = requests.get(f"{one.url.removesuffix('/api/v1')}/agents?show=all", headers=headers, timeout=30)
        assert page.status_code == 200
        assert fleet_record(1).vm.name in page.text
    store = postgresql_database.store()
    assert audit_fault(store) is None


def follow(portal, count):
    """Poll as an agent does, with the index of the last response, until *count* decisions have arrived."""
    found, index = [], 0
    while len(found) < count:
        answer = poll(portal.url, index=index, wait=30)
        found, index = found + answer["decisions"], answer["index"]
    return found


def test_decisions_of_two_processes_reach_each_poll_once_and_in_order(portals, pair):
    """A poll with index 0 is answered at once, with the decisions that this process has read by then.

    The test also detects deadlocks: people and programs take the locks of both counters at the same time.
    """
    assert send(portals[0].url, [fleet_record(0, event_id=f"E-{number}") for number in range(12)]).status_code == 204
    for portal in portals:
        poll(portal.url, kids=["p1"])
    keys = [key_of_event_id(f"E-{number}") for number in range(12)]
    digests = [portals[0].get(f"/events/{key}").json()["event"]["digest"] for key in keys]
    tokens = [pair.signer.sign() for _ in keys]
    with ThreadPoolExecutor(10) as pool:
        following = [pool.submit(follow, portal, 24) for portal in portals]
        people = [
            pool.submit(say, portals[number % 2].url, "ann", "hold", key=key, digest=found)
            for number, (key, found) in enumerate(zip(keys, digests, strict=True))
        ]
        programs = [pool.submit(bring, portals[number % 2].url, token) for number, token in enumerate(tokens)]
        assert {each.result(60).status_code for each in people} == {201}
        assert {each.result(60).status_code for each in programs} == {200}
        received, elsewhere = (each.result(60) for each in following)
    assert received == elsewhere
    assert len(set(received)) == 24
