"""The simulator over HTTP: documents, identities, approvals, faults, and access."""

import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
import requests
from simulator_requests import EVENTS, METADATA, approve, get

from bridge.testing import EventSpec, Fault, Machine, Simulator, SimulatorError, WrongRequest, parse_scenario, serve

COMPUTE = "/metadata/instance/compute?api-version=2021-02-01"

TOKEN = "/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Feventhubs.azure.net"


def test_events_document_follows_the_clock_over_one_connection(simulator, session, clock):
    assert get(session, simulator).json() == {"DocumentIncarnation": 1, "Events": []}
    event_id = simulator.world.add_event(EventSpec(event_type="Freeze"))
    assert get(session, simulator).json()["Events"][0]["NotBefore"] == "Mon, 06 May 2030 07:23:09 GMT"
    clock.advance(900)
    answer = get(session, simulator)
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.json()["DocumentIncarnation"] == 3
    assert [event["EventId"] for event in answer.json()["Events"]] == [event_id]
    assert len(simulator._servers[0]._connections) == 1


def test_request_without_the_metadata_header_is_rejected_since_2017_08_01(simulator):
    def status(version):
        url = f"{simulator.endpoint}/metadata/scheduledevents?api-version={version}"
        return requests.get(url, timeout=5).status_code

    assert [status(version) for version in ("2017-03-01", "2017-08-01", "2020-07-01")] == [200, 400, 400]


def test_forwarded_request_is_rejected(simulator, session):
    for path in (EVENTS, COMPUTE, TOKEN):
        assert get(session, simulator, path, headers={"X-Forwarded-For": "10.0.0.1"}).status_code == 400


@pytest.mark.parametrize("query", ["", "?api-version=", "?api-version=latest", "?api-version=2099-01-01"])
def test_invalid_api_version_returns_the_newest_versions(simulator, session, query):
    answer = get(session, simulator, "/metadata/scheduledevents" + query)
    assert answer.status_code == 400
    assert answer.json() == {
        "error": "Bad request. api-version is invalid or was not specified in the request.",
        "newest-versions": ["2024-07-09", "2020-07-01", "2019-08-01"],
    }


def test_approving_several_events_in_one_request_is_idempotent(simulator, session):
    ids = [simulator.world.add_event(EventSpec(event_type="Freeze")) for _ in range(2)]
    assert approve(session, simulator, *ids).status_code == 200
    assert {event["EventStatus"] for event in get(session, simulator).json()["Events"]} == {"Started"}
    assert approve(session, simulator, ids[0]).status_code == 200
    seen = [(item.vm, item.event_id, item.result) for item in simulator.world.approvals]
    assert seen == [
        ("web_3", ids[0], "approved"),
        ("web_3", ids[1], "approved"),
        ("web_3", ids[0], "already_started"),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"StartRequests": []}',
        b'{"StartRequests": ["A"]}',
        b'{"StartRequests": [{"EventId": 1}]}',
    ],
)
def test_an_approval_with_a_malformed_body_is_400(simulator, session, body):
    answer = session.post(simulator.endpoint + EVENTS, data=body, timeout=5)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Bad request.")


def test_an_approval_of_an_unknown_event_or_without_the_header_is_400(simulator, session):
    event_id = simulator.world.add_event(EventSpec(event_type="Freeze"))
    assert approve(session, simulator, event_id, "00000000-0000-0000-0000-000000000000").status_code == 400
    assert (
        requests.post(
            simulator.endpoint + EVENTS, json={"StartRequests": [{"EventId": event_id}]}, timeout=5
        ).status_code
        == 400
    )
    assert simulator.world.events()[0].status == "Scheduled"


def test_versions_of_2017_require_the_incarnation_in_an_approval(simulator, session):
    event_id = simulator.world.add_event(EventSpec(event_type="Freeze"))
    old = "/metadata/scheduledevents?api-version=2017-11-01"
    assert approve(session, simulator, event_id, path=old).status_code == 400
    assert approve(session, simulator, event_id, path=old, DocumentIncarnation=2).status_code == 200


def test_the_instance_document_names_the_instance_of_a_scale_set(simulator, session):
    compute = get(session, simulator, COMPUTE).json()
    assert compute["name"] == "web_3"
    assert compute["vmScaleSetName"] == "web"
    assert compute["resourceId"].endswith("/virtualMachineScaleSets/web/virtualMachines/3")
    assert compute["vmId"] == Machine(name="web_3").vm_id
    whole = get(session, simulator, "/metadata/instance?api-version=2021-02-01").json()
    assert whole["compute"] == compute
    assert get(session, simulator, "/metadata/instance/compute/colour?api-version=2021-02-01").status_code == 404


def test_managed_identity_returns_a_token_for_the_resource(simulator, session):
    token = get(session, simulator, TOKEN + "&client_id=abc").json()
    assert token["resource"] == "https://eventhubs.azure.net"
    assert token["token_type"] == "Bearer"
    assert token["client_id"] == "abc"
    assert int(token["expires_on"]) == simulator.world.clock.now().timestamp() + int(token["expires_in"])
    assert token["access_token"].count(".") == 2


@pytest.mark.parametrize(
    "path",
    [
        "/metadata/identity/oauth2/token?resource=r",
        "/metadata/identity/oauth2/token?api-version=2018-02-01",
        "/metadata/identity/oauth2/token?api-version=2099-01-01&resource=r",
    ],
)
def test_incomplete_token_request_is_400(simulator, session, path):
    answer = get(session, simulator, path)
    assert answer.status_code == 400
    assert answer.json()["error"] == "invalid_request"


def test_other_paths_and_methods_are_404_and_405(simulator, session):
    assert get(session, simulator, "/").status_code == 404
    assert get(session, simulator, "/metadata/elsewhere").status_code == 404
    assert session.put(simulator.endpoint + EVENTS, timeout=5).status_code == 405


def test_sixth_request_within_a_second_is_429_for_that_vm_only(clock, session):
    with Simulator(vms=["a", "b"], clock=clock) as simulator:
        paths = [EVENTS, COMPUTE, TOKEN, EVENTS, EVENTS, EVENTS]
        assert [get(session, simulator, path).status_code for path in paths] == [200, 200, 200, 200, 200, 429]
        assert session.get(simulator.endpoints["b"] + EVENTS, timeout=5).status_code == 200
        clock.advance(0.999)
        assert get(session, simulator).status_code == 429
        clock.advance(0.001)
        assert get(session, simulator).status_code == 200


def test_every_vm_of_a_fleet_gets_the_same_events_and_its_own_identity(clock, session):
    with Simulator(vms=["web_1", "web_2", "web_10"], clock=clock) as simulator:
        event_id = simulator.world.add_event(EventSpec(event_type="Freeze"))
        for name, endpoint in simulator.endpoints.items():
            document = session.get(endpoint + EVENTS, timeout=5).json()
            assert document["Events"][0]["EventId"] == event_id
            assert document["Events"][0]["Resources"] == ["web_1", "web_2", "web_10"]
            assert session.get(endpoint + COMPUTE, timeout=5).json()["name"] == name
        body = {"StartRequests": [{"EventId": event_id}]}
        session.post(simulator.endpoints["web_10"] + EVENTS, json=body, timeout=5)
        assert simulator.world.approvals[0].vm == "web_10"


def test_fault_affects_only_its_target_and_ends_after_its_count(simulator, session):
    simulator.world.set_fault(Fault(kind="status", status=503, retry_after_seconds=7, count=2))
    simulator.world.set_fault(Fault(kind="status", status=429, count=1))
    answers = [get(session, simulator) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [503, 503, 429, 200]
    assert answers[0].headers["Retry-After"] == "7"
    assert get(session, simulator, COMPUTE).status_code == 200
    assert [seen.fault for seen in simulator.requests] == ["status", "status", "status", None, None]


def test_fault_can_affect_only_approvals_until_it_is_cleared(simulator, session):
    event_id = simulator.world.add_event(EventSpec(event_type="Freeze"))
    simulator.world.set_fault(Fault(kind="status", status=500, method="POST"))
    assert [approve(session, simulator, event_id).status_code for _ in range(3)] == [500, 500, 500]
    assert get(session, simulator).json()["Events"][0]["EventStatus"] == "Scheduled"
    simulator.world.clear_faults()
    assert approve(session, simulator, event_id).status_code == 200


@pytest.mark.parametrize("target", ["scheduledevents", "identity", "token"])
def test_each_path_has_separate_faults(simulator, session, target):
    paths = {"scheduledevents": EVENTS, "identity": COMPUTE, "token": TOKEN}
    simulator.world.set_fault(Fault(kind="status", status=410, target=target))
    for name, path in paths.items():
        assert get(session, simulator, path).status_code == (410 if name == target else 200)


def test_faults_return_empty_truncated_garbage_and_oversized_bodies(simulator, session):
    right = get(session, simulator).content
    for kind in ("empty", "truncated", "garbage", "oversize"):
        simulator.world.set_fault(Fault(kind=kind, count=1))
    empty, truncated, garbage, oversize = (get(session, simulator) for _ in range(4))
    assert empty.content == b""
    assert truncated.content == right[: len(right) // 2]
    with pytest.raises(requests.JSONDecodeError):
        garbage.json()
    assert len(oversize.content) > 1 << 20
    assert get(session, simulator).content == right


def test_faults_cut_close_and_redirect_connections(simulator, session):
    simulator.world.set_fault(Fault(kind="cut", count=1))
    with pytest.raises(requests.RequestException):
        get(session, simulator)
    simulator.world.set_fault(Fault(kind="disconnect", count=1))
    with pytest.raises(requests.ConnectionError):
        get(session, simulator)
    simulator.world.set_fault(Fault(kind="redirect", count=1))
    answer = get(session, simulator)
    assert (answer.status_code, answer.headers["Location"]) == (302, "/elsewhere")
    assert get(session, simulator).status_code == 200


def test_silence_fault_sends_nothing_and_ends_with_the_client(simulator, session):
    simulator.world.set_fault(Fault(kind="silence", count=1))
    with pytest.raises(requests.ReadTimeout):
        get(session, simulator, timeout=0.3)
    assert simulator.requests[-1].fault == "silence"
    assert get(session, simulator).status_code == 200


def test_drip_fault_defeats_a_read_timeout(simulator):
    simulator.world.set_fault(Fault(kind="drip", delay_seconds=0.05, count=1))
    url = urlsplit(simulator.endpoint)
    request = f"GET {EVENTS} HTTP/1.1\r\nHost: localhost\r\nMetadata: true\r\n\r\n".encode()
    with socket.create_connection((url.hostname, url.port), timeout=1.5) as peer:
        started = time.monotonic()
        peer.sendall(request)
        first = b"".join(peer.recv(1) for _ in range(40))
        assert time.monotonic() - started > 1.5
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")


def test_first_call_fault_delays_only_the_first_call(session):
    with Simulator(first_call_seconds=0.4) as simulator:
        started = time.monotonic()
        assert get(session, simulator).status_code == 200
        assert time.monotonic() - started >= 0.4
        assert not simulator.world.faults.waiting()


def test_close_ends_silent_slow_and_dripping_connections_immediately(session):
    simulator = Simulator(rate_limit=False)
    simulator.start()
    for kind in ("silence", "slow", "drip"):
        simulator.world.set_fault(Fault(kind=kind, delay_seconds=60, count=1))
    ended = []

    def ask():
        with pytest.raises(requests.RequestException):
            requests.get(simulator.endpoint + EVENTS, headers=METADATA, timeout=30)
        ended.append(True)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    while len(simulator.requests) < 3 and time.monotonic() < deadline:
        get(session, simulator, "/control/requests")
    started = time.monotonic()
    simulator.close()
    for thread in threads:
        thread.join(15)
    assert len(ended) == 3
    assert time.monotonic() - started < 15, "they would answer after a minute"
    simulator.close()


def test_control_endpoint_rejects_requests_from_web_pages(simulator, session):
    answer = get(session, simulator, "/control", headers={"Origin": "https://example.net"})
    assert answer.status_code == 403


@pytest.mark.parametrize("path", [EVENTS, COMPUTE, TOKEN, "/control/state"])
def test_dns_rebinding_to_loopback_is_rejected(session, simulator, path):
    assert get(session, simulator, path, headers={"Host": "evil.example"}).status_code == 421
    assert get(session, simulator, path, headers={"Host": "localhost:8169"}).status_code != 421
    incarnation = f"{simulator.endpoint}/control/incarnation"
    assert session.post(incarnation, headers={"Host": "evil.example"}, timeout=5).status_code == 421


def test_remotely_reachable_simulator_accepts_any_host_name(session):
    with Simulator(listen="0.0.0.0:0", allow_remote=True) as simulator:
        url = simulator.endpoint.replace("0.0.0.0", "127.0.0.1") + EVENTS
        assert session.get(url, headers={"Host": "simulator:8169"}, timeout=5).status_code == 200


def test_simulator_listens_on_loopback_by_default():
    for listen in ("0.0.0.0:0", "192.0.2.1:80", "example.net:80"):
        with pytest.raises(WrongRequest, match="loopback"):
            Simulator(listen=listen)
    for listen in ("", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":80"):
        with pytest.raises(WrongRequest, match="HOST:PORT"):
            Simulator(listen=listen)
    Simulator(listen="0.0.0.0:0", allow_remote=True).close()


def test_occupied_port_is_reported():
    with Simulator() as simulator:
        taken = simulator.endpoint.removeprefix("http://")
        with pytest.raises(SimulatorError, match="cannot listen"):
            Simulator(listen=taken)


def test_serve_prints_every_change():
    stop, said = threading.Event(), []

    def say(line):
        said.append(line)
        if "completed" in line:
            stop.set()

    steps = '[[steps]]\nat = 60\nadd = "a"\nevent_type = "Preempt"\nnotice_seconds = 30\nimpact_seconds = 10\n'
    scenario = parse_scenario(steps, name="short")
    serve(stop=stop, say=say, scenario=scenario, vms=("a", "b"), speed=200)
    assert [line.split(": ")[0] for line in said[:3]] == ["a", "b", "control"]
    assert [line.split("] ")[1].split()[0] for line in said[3:]] == ["scheduled", "started", "completed"]
    assert "Preempt" in said[3]
    assert "for a, b, NotBefore in 30 s (incarnation 2)" in said[3]
