"""Decisions of users over HTTP: delivery to held polls, authorization, and validation."""

import threading

import pytest
import requests
from fleet_records import fleet_record, vm_id_of
from page_kit import PEOPLE, Office
from portal_users import session_headers, start_session

from bridge.approval.decision_token import verify
from bridge.clock import REAL_CLOCK, utc_now
from bridge.config.trusted_keys import TrustedKey
from bridge.portal.fleet import key_of_event_id

KEY = key_of_event_id("A")


class Api(Office):
    """Requests of Ann, Bob, and Vic with their session cookies and CSRF tokens."""

    def headers(self, name):
        return {**session_headers(name), "Origin": self.origin}

    def say(self, name, verdict, *, digest=None, key=KEY, headers=None, **more):
        body = {"verdict": verdict, "digest": digest or self.digest(key), **more}
        url = f"{self.portal.url}/events/{key}/verdicts"
        return requests.post(url, json=body, headers={**self.headers(name), **(headers or {})}, timeout=20)

    def digest(self, key=KEY):
        return self.portal.get(f"/events/{key}").json()["event"]["digest"]

    def told(self, vm):
        """Verify the decisions for *vm* as its agent does, and return the verdicts."""
        keys = [TrustedKey(kid="p1", approver="portal", public_key_file=str(self.public_key_file))]
        found = self.poll(vm)["decisions"]
        past = utc_now().replace(year=2020)
        claims = [verify(each, keys=keys, audience=vm_id_of(vm), now=utc_now(), created_at=past) for each in found]
        return [each.verdict.value for each in claims]


@pytest.fixture
def office(tmp_path):
    office = Api(tmp_path, clock=REAL_CLOCK)
    for name, _, _ in PEOPLE:
        start_session(office.store, name)
    with office:
        office.portal.send(fleet_record(0), fleet_record(1), fleet_record(2, event_id="B", resources=("vm_2",)))
        yield office


@pytest.fixture
def connected(office):
    for vm in (0, 1):
        office.poll(vm)
    return office


def test_verdict_accepts_the_eventid_in_place_of_the_key(connected):
    assert connected.say("ann", "hold", key="A").status_code == 201


def test_held_poll_receives_an_approval_immediately(connected):
    index = connected.poll(0)["index"]
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(connected.poll(0, index=index, wait=30)))
    waiting.start()
    answer = connected.say("ann", "approve", reason="now, while it is quiet")
    assert (answer.status_code, answer.json()["outcome"]) == (201, "approved")
    assert set(answer.json()["sent_to"]) == {vm_id_of(0), vm_id_of(1)}
    waiting.join(20)
    assert len(answers[0]["decisions"]) == 1
    assert connected.told(0) == ["approve"]


def test_hold_reaches_every_vm_of_the_group_and_blocks_approvals(connected):
    assert connected.say("ann", "hold").status_code == 201
    answer = connected.say("bob", "approve")
    assert (answer.status_code, answer.json()["error"]) == (
        409,
        "The event is held by ann. Withdraw the hold to approve the event.",
    )
    assert answer.json()["event"]["key"] == KEY
    assert [connected.told(vm) for vm in (0, 1, 2)] == [["hold"]] * 3


def test_approval_that_no_agent_would_follow_is_rejected_with_each_reason(office):
    office.poll(0, version="1", kids=["other"])
    answer = office.say("ann", "approve")
    assert answer.status_code == 409
    reasons = "vm_0 does not trust the key p1; vm_1 has not polled for decisions within the last day"
    assert reasons in answer.json()["error"]
    office.poll(1, kids=["p1"], dry_run=False)
    assert office.say("ann", "approve").json()["sent_to"] == [vm_id_of(1)]


@pytest.mark.parametrize(
    ("name", "headers", "status"),
    [
        ("vic", {}, 403),
        ("eve", {}, 401),
        ("ann", {"Origin": "https://evil.example"}, 403),
        ("ann", {"Origin": None}, 403),
        ("ann", {"X-CSRF-Token": "guessed"}, 403),
        ("ann", {"X-CSRF-Token": None}, 403),
        ("ann", {"Cookie": None}, 401),
        ("ann", {"Cookie": None, "Authorization": "Bearer readers-token-1"}, 401),
        ("ann", {"Cookie": None, "X-Forwarded-User": "ann"}, 401),
    ],
)
def test_unauthorized_request_cannot_decide(connected, name, headers, status):
    assert connected.say(name, "approve", headers=headers).status_code == status
    assert connected.told(0) == []


@pytest.mark.parametrize(
    "change",
    [{"verdict": "deny"}, {"digest": "x"}, {"valid_seconds": 0}, {"valid_seconds": 1e9}, {"unknown": 1}, {"reason": 1}],
)
def test_invalid_body_is_rejected(connected, change):
    body = {"verdict": "approve", "digest": connected.digest(), **change}
    url = f"{connected.portal.url}/events/{KEY}/verdicts"
    assert requests.post(url, json=body, headers=connected.headers("ann"), timeout=20).status_code == 400


def test_withdrawn_approval_sends_a_hold_to_every_vm(connected):
    verdict_id = connected.say("ann", "approve").json()["verdict_id"]
    url = f"{connected.portal.url}/verdicts/{verdict_id}"
    assert requests.delete(url, headers=connected.headers("vic"), timeout=20).status_code == 403
    assert requests.delete(url, headers=connected.headers("bob"), timeout=20).status_code == 200
    assert requests.delete(url, headers=connected.headers("bob"), timeout=20).status_code == 409
    assert connected.told(0) == ["approve", "hold"]
    audited = [(entry["actor"], entry["action"]) for entry in connected.portal.get("/audit").json()["entries"]]
    assert ("bob", "withdrew") in audited


def test_reason_is_one_printable_line(connected):
    connected.say("ann", "approve", reason="<script>\r\nSet-Cookie: x\x00\u202e" + "y" * 500)
    [entry] = [each for each in connected.portal.get("/audit").json()["entries"] if each["action"] == "approved"]
    assert entry["details"]["reason"].startswith("<script>  Set-Cookie: x  y")
    assert len(entry["details"]["reason"]) == 200


@pytest.mark.parametrize("verdict", ["approve", "hold"])
def test_verdict_on_a_recommendation_is_rejected_and_the_page_shows_the_reason(connected, verdict):
    risk = fleet_record(0, sequence=2, event_id="R", event_type="SpotRebalanceRecommendation")
    connected.portal.send(risk)
    answer = connected.say("ann", verdict, key=key_of_event_id("R"))
    assert answer.status_code == 409
    assert "acknowledging a recommendation has no effect" in answer.json()["error"]
    page = requests.get(
        f"{connected.origin}/events/{key_of_event_id('R')}", headers=connected.headers("ann"), timeout=20
    )
    assert "acknowledging a recommendation has no effect" in page.text
    assert 'value="approve"' not in page.text
