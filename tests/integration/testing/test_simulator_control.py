"""The control endpoint of the simulator, and its attested documents."""

import base64
import json
import re

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from simulator_requests import approve, get

from bridge.testing import EventSpec, Fault
from bridge.testing.simulator.faults import KINDS


def test_control_endpoint_changes_an_event_through_every_status(simulator, session, clock):
    base = simulator.endpoint + "/control"
    created = session.post(base + "/events", json={"event_type": "Reboot", "impact_seconds": 1e9}, timeout=5)
    assert created.status_code == 201
    event_id = created.json()["event_id"]
    (event,) = session.get(base + "/events", timeout=5).json()
    assert (event["event_id"], event["status"], event["not_before"]) == (
        event_id,
        "Scheduled",
        "2030-05-06T07:23:09Z",
    )
    url = f"{base}/events/{event_id}"
    assert session.post(url + "/update", json={"event_type": "Freeze"}, timeout=5).status_code == 200
    assert session.post(url + "/start", timeout=5).json()["incarnation"] == 4
    clock.advance(1_000_000)
    assert session.post(url + "/cancel", timeout=5).status_code == 409
    assert session.post(url + "/complete", timeout=5).status_code == 200
    assert session.post(url + "/complete", timeout=5).status_code == 404
    assert get(session, simulator).json() == {"DocumentIncarnation": 5, "Events": []}


def test_the_control_endpoint_lists_approvals_and_requests(simulator, session):
    event_id = simulator.world.add_event(EventSpec(event_type="Freeze"))
    approve(session, simulator, event_id)
    (approval,) = get(session, simulator, "/control/approvals").json()
    assert approval == {
        "at": "2030-05-06T07:08:09Z",
        "vm": "web_3",
        "event_id": event_id,
        "result": "approved",
    }
    (request,) = get(session, simulator, "/control/requests").json()
    assert (request["method"], request["path"], request["status"]) == ("POST", "/metadata/scheduledevents", 200)


def test_the_control_endpoint_sets_lists_and_clears_faults(simulator, session):
    base = simulator.endpoint + "/control/faults"
    for kind in KINDS:
        assert session.post(base, json={"kind": kind, "target": "token"}, timeout=5).status_code == 201
    assert [fault["kind"] for fault in session.get(base, timeout=5).json()] == list(KINDS)
    assert session.delete(base + "?target=tokne", timeout=5).status_code == 400
    assert session.delete(base + "?target=token", timeout=5).status_code == 200
    assert session.get(base, timeout=5).json() == []


ATTESTED = "/metadata/attested/document?api-version=2020-09-01"


def attested(session, simulator, nonce):
    answer = get(session, simulator, f"{ATTESTED}&nonce={nonce}").json()
    assert answer["encoding"] == "pkcs7"
    der = base64.b64decode(answer["signature"], validate=True)
    return json.loads(re.search(rb'\{"licenseType".*?"vmId":"[^"]*"\}', der)[0])


def test_attested_document_contains_the_vm_id_and_the_nonce(simulator, session):
    found = attested(session, simulator, "abc-1")
    (machine,) = simulator.machines
    assert found["vmId"] == machine.vm_id
    assert found["subscriptionId"] == machine.subscription_id
    assert found["nonce"] == "abc-1"
    assert found["timeStamp"] == {"createdOn": "05/06/30 07:08:09 -0000", "expiresOn": "05/06/30 13:08:09 -0000"}
    assert get(session, simulator, f"{ATTESTED}&nonce={'a' * 33}").status_code == 400
    assert get(session, simulator, "/metadata/attested/document?api-version=2017-04-02").status_code == 400
    assert requests.get(simulator.endpoint + ATTESTED, timeout=5).status_code == 400
    assert session.post(simulator.endpoint + ATTESTED, timeout=5).status_code == 405
    assert [each.status for each in simulator.requests] == [200, 400, 400, 400, 405]


def test_cached_nonce_fault_repeats_the_previous_nonce_only(simulator, session):
    attested(session, simulator, "first")
    simulator.world.set_fault(Fault(kind="cached_nonce", count=1))
    assert get(session, simulator).json()["Events"] == []
    assert attested(session, simulator, "second")["nonce"] == "first"
    assert attested(session, simulator, "third")["nonce"] == "third"


def test_control_endpoint_returns_the_signing_certificates(simulator, session):
    root, intermediate = (
        x509.load_pem_x509_certificate(session.get(simulator.endpoint + path, timeout=5).content)
        for path in ("/control/attestation/root", "/control/attestation/intermediate")
    )
    intermediate.verify_directly_issued_by(root)
    assert root.public_bytes(Encoding.PEM) == simulator.attestation.root_pem


def test_the_control_endpoint_resets_the_incarnation(simulator, session):
    session.post(simulator.endpoint + "/control/incarnation", json={"to": 7}, timeout=5)
    assert get(session, simulator).json() == {"DocumentIncarnation": 7, "Events": []}


@pytest.mark.parametrize(
    ("request_line", "body", "status", "words"),
    [
        ("POST /control/events", b"{", 400, "not valid JSON"),
        ("POST /control/events", b"[]", 400, "JSON object"),
        ("POST /control/events", b"{}", 400, "event_type is missing"),
        (
            "POST /control/events",
            b'{"event_type": "Freeze", "notce_seconds": 1}',
            400,
            "Did you mean 'notice_seconds'",
        ),
        ("POST /control/events", b'{"event_type": "Freeze", "notice_seconds": 1e300}', 400, "notice_seconds"),
        ("POST /control/events/NONE/start", b"", 404, "EventId NONE"),
        ("POST /control/events/NONE/strat", b"", 404, "Did you mean 'start'"),
        ("POST /control/faults", b'{"kind": "slwo"}', 400, "Did you mean 'slow'"),
        ("GET /control/fautls", b"", 404, "Did you mean 'faults'"),
    ],
)
def test_invalid_control_request_is_rejected_with_the_reason(simulator, session, request_line, body, status, words):  # noqa: PLR0917
    method, path = request_line.split()
    answer = session.request(method, simulator.endpoint + path, data=body, timeout=5)
    assert answer.status_code == status
    assert words in answer.json()["error"]
