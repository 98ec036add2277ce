"""The long poll of PROTOCOL.md, sections 2 to 4, and the endpoint for signed decisions."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
import requests
from fleet_records import fleet_record, vm_id_of
from portal_kit import AGENT_TOKEN, RunningPortal
from portal_pair import bring
from signers import Signer
from waiting import until

from bridge.approval.portal_client import MAX_ANSWER_BYTES, MAX_DECISIONS, PortalClient
from bridge.clock import Clock
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.events.record import Transition

VM = vm_id_of(0)


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def portal(tmp_path, signer):
    with RunningPortal(tmp_path, keys=[signer.table()]) as running:
        yield running


def ask(portal, vm_id=VM, *, index=0, wait=30, token=AGENT_TOKEN, timeout=20):
    return requests.get(
        f"{portal.url}/vms/{vm_id}/decisions",
        params={"index": index, "wait": wait},
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
        timeout=timeout,
    )


def brought(portal, *tokens):
    answer = bring(portal.url, *tokens)
    assert answer.status_code == 200, answer.text
    return [each["index"] for each in answer.json()["decisions"]]


def test_poll_with_index_0_returns_immediately_without_decisions(portal):
    answer = ask(portal)
    assert answer.status_code == 200
    assert answer.json() == {"index": 1, "decisions": [], "epoch": answer.json()["epoch"]}
    assert len(answer.json()["epoch"]) == 36


def test_poll_returns_decisions_after_the_given_index(portal, signer):
    tokens = [signer.sign(), signer.sign()]
    one, other = brought(portal, *tokens)
    assert (one, other) == (2, 3)
    assert ask(portal).json()["decisions"] == tokens
    assert ask(portal, index=2).json()["decisions"] == tokens[1:]
    assert ask(portal, vm_id=vm_id_of(1)).json()["decisions"] == []


def test_held_poll_returns_only_for_a_decision_of_its_vm(portal, signer):
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(ask, portal, index=1, wait=30)
        others = pool.submit(ask, portal, vm_id_of(1), index=1, wait=3)
        until(lambda: portal.held_polls() == 2)
        began = time.monotonic()
        token = signer.sign()
        brought(portal, token)
        answer = mine.result(20).json()
        assert time.monotonic() - began < 5
        assert (answer["index"], answer["decisions"]) == (2, [token])
        answer = others.result(20).json()
        assert (answer["index"], answer["decisions"]) == (2, [])


def test_poll_returns_shortly_before_its_wait_ends(portal):
    began = time.monotonic()
    answer = ask(portal, index=1, wait=2)
    assert 1.5 <= time.monotonic() - began < 8
    assert (answer.status_code, answer.json()["index"], answer.json()["decisions"]) == (200, 1, [])


def test_poll_with_a_too_high_index_returns_everything_immediately(portal, signer):
    token = signer.sign()
    brought(portal, token)
    answer = ask(portal, index=99).json()
    assert (answer["index"], answer["decisions"]) == (2, [token])


def test_expired_approval_is_omitted_but_a_hold_remains_until_the_event_ends(tmp_path, signer):
    ahead = timedelta()
    clock = Clock(now=lambda: datetime.now(timezone.utc) + ahead)
    running = RunningPortal(tmp_path, keys=[signer.table()], clock=clock)
    with running as portal:
        portal.send(fleet_record(0))
        hold = signer.sign(decision="hold", valid_seconds=600)
        brought(portal, signer.sign(valid_seconds=600), hold)
        assert len(ask(portal).json()["decisions"]) == 2
    ahead = timedelta(seconds=700)
    with running as portal:
        assert ask(portal).json()["decisions"] == [hold]
        portal.send(fleet_record(0, sequence=2, transition=Transition.COMPLETED, seconds=9))
    with running as portal:
        answer = ask(portal).json()
        assert (answer["index"], answer["decisions"]) == (3, [])


def test_response_is_limited_to_1000_decisions_and_one_mebibyte(portal, signer, tmp_path):
    long = [signer.sign(reason="x" * 256, jti=f"{number}-{'y' * 120}") for number in range(1_000)]
    for start in range(0, 1_000, 500):
        brought(portal, *long[start : start + 500])
    brought(portal, *(signer.sign(reason="x" * 256) for _ in range(200)))
    (tmp_path / "agent-token").write_text(AGENT_TOKEN, encoding="utf-8")
    key = KeySettings(**signer.table())
    client = PortalClient(RemoteSettings(url=portal.url, keys=(key,), token_file=str(tmp_path / "agent-token")))
    seen, index = [], 0
    try:
        for _ in range(10):
            answer = client.poll(VM, index=index)
            seen += answer.decisions
            is_full = len(answer.decisions) == MAX_DECISIONS or sum(map(len, answer.decisions)) > 1_032_192
            if not is_full:
                break
            index = answer.index
    finally:
        client.close()
    assert len(seen) == len(set(seen)) == 1_200
    raw = ask(portal)
    assert len(raw.content) <= MAX_ANSWER_BYTES
    assert len(raw.json()["decisions"]) == 1_000 or sum(map(len, raw.json()["decisions"])) > 1_032_192


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        (f"/vms/{VM}/decisions", "", 400),
        (f"/vms/{VM}/decisions", "index=0", 400),
        (f"/vms/{VM}/decisions", "index=-1&wait=30", 400),
        (f"/vms/{VM}/decisions", "index=0&wait=0", 400),
        (f"/vms/{VM}/decisions", "index=1.0&wait=30", 400),
        (f"/vms/{VM}/decisions", f"index={2**53}&wait=30", 400),
        (f"/vms/{VM}/decisions", f"index={'9' * 5000}&wait=30", 400),
        (f"/vms/{VM}/decisions", "index=%D9%A1&wait=30", 400),
        (f"/vms/{VM}/decisions/", "index=0&wait=30", 404),
        (f"/vms/{VM}%2Fdecisions", "index=0&wait=30", 404),
        (f"/vms/x%2F..%2F{VM}/decisions", "index=0&wait=30", 404),
        ("/vms//decisions", "index=0&wait=30", 404),
        (f"/vms/{'x' * 129}/decisions", "index=0&wait=30", 404),
        ("/vms/%E2%80%AE/decisions", "index=0&wait=30", 404),
    ],
)
def test_request_outside_the_protocol_is_rejected(portal, path, query, status):
    answer = requests.get(f"{portal.url}{path}?{query}", headers={"Authorization": f"Bearer {AGENT_TOKEN}"}, timeout=20)
    assert answer.status_code == status


@pytest.mark.parametrize("token", [None, "wrong", "readers-token-1"])
def test_poll_without_an_agent_token_is_rejected(portal, signer, token):
    brought(portal, signer.sign())
    answer = ask(portal, token=token)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert set(answer.json()) == {"error"}


def test_stop_completes_held_polls_within_five_seconds(tmp_path):
    running = RunningPortal(tmp_path).start()
    with ThreadPoolExecutor(30) as pool:
        waiting = [pool.submit(ask, running, vm_id_of(vm), index=1, wait=600, timeout=60) for vm in range(30)]
        until(lambda: running.held_polls() == 30)
        began = time.monotonic()
        running.stop()
        assert time.monotonic() - began < 5
        answers = [each.result(20) for each in waiting]
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.json()["decisions"] == [] for answer in answers)


def test_excess_polls_of_one_vm_complete_the_oldest_polls(portal):
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ask, portal, index=1, wait=600, timeout=60) for _ in range(6)]
        until(lambda: sum(each.done() for each in waiting) == 2)
        assert portal.held_polls() == 4
        portal.stop()
        assert {each.result(20).status_code for each in waiting} == {200}


def test_invalid_decisions_are_rejected_with_the_reason(portal, signer, tmp_path):
    good = signer.sign()
    header, payload, signature = good.split(".")
    stranger = Signer(tmp_path, "stranger")
    long_ago = datetime.now(timezone.utc) - timedelta(days=1)
    tokens = {
        "malformed": "x",
        "forged": f"{header}.{payload}.{signature[:-4]}AAAA",
        "unknown_key": stranger.sign(),
        "expired": signer.sign(now=long_ago, valid_seconds=60),
        "not_yet_valid": signer.sign(now=datetime.now(timezone.utc) + timedelta(hours=1)),
    }
    answer = bring(portal.url, *tokens.values(), good)
    assert answer.status_code == 200
    assert [each.get("refused") for each in answer.json()["decisions"]] == [*tokens, None]
    assert ask(portal).json()["decisions"] == [good]
    assert bring(portal.url, "x").status_code == 400
    assert 'scheduled_events_portal_decisions_refused_total{reason="forged"} 1.0' in portal.metrics()


def test_repeated_decision_is_stored_once_and_audited_with_its_approver(portal, signer):
    token = signer.sign(reason="month end")
    assert brought(portal, token) == brought(portal, token, token)[:1] == [2]
    [entry] = [each for each in portal.get("/audit").json()["entries"] if each["action"] == "decided_approve"]
    assert (entry["actor"], entry["details"]["reason"], entry["details"]["event_id"]) == ("ada", "month end", "A")


def test_concurrent_decisions_have_consecutive_indexes_and_reach_every_poll(portal, signer):
    """20 agents poll for their decisions as in PROTOCOL.md while 4 users decide."""
    seen = {vm: [] for vm in range(20)}
    stop = threading.Event()

    def follow(vm):
        index = 0
        while not stop.is_set():
            answer = ask(portal, vm_id_of(vm), index=index, wait=2).json()
            assert answer["index"] >= index
            seen[vm] += answer["decisions"]
            index = answer["index"]

    agents = [threading.Thread(target=follow, args=(vm,)) for vm in seen]
    for agent in agents:
        agent.start()
    tokens = {vm: [signer.sign(vm_id_of(vm)) for _ in range(3)] for vm in seen}
    every = [token for of_vm in tokens.values() for token in of_vm]
    batches = [every[start::12] for start in range(12)]  # each for five VMs
    with ThreadPoolExecutor(4) as pool:
        numbers = [number for found in pool.map(lambda batch: brought(portal, *batch), batches) for number in found]
    assert sorted(numbers) == list(range(2, 62))
    until(lambda: all(len(found) >= 3 for found in seen.values()))
    stop.set()
    for agent in agents:
        agent.join()
    assert {vm: sorted(found) for vm, found in seen.items()} == {vm: sorted(of_vm) for vm, of_vm in tokens.items()}
