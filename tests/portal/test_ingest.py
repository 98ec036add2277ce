"""Ingestion of records over HTTP: the forms of a CloudEvent, authentication, and invalid records."""

import contextlib
import json
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import requests
from fleet_records import fleet_record, vm_id_of
from portal_kit import AGENT_TOKEN, BATCH, STRUCTURED, RunningPortal, batch, binary_headers, body_of

from bridge.portal import ingest
from bridge.portal.requests import MAX_BODY_BYTES
from bridge.portal.store.ingest import add_records
from bridge.portal.vm_state import vm_key
from sinks.cloudevent import cloud_event_bytes


@pytest.fixture(scope="module")
def portal(tmp_path_factory):
    with RunningPortal(tmp_path_factory.mktemp("portal")) as running:
        yield running


@pytest.fixture
def fresh(tmp_path):
    with RunningPortal(tmp_path) as running:
        yield running


def shown(portal, event_id):
    answer = portal.get(f"/events/{event_id}")
    return answer.json() if answer.status_code == 200 else None


def test_structured_cloudevent_is_stored(portal):
    record = fleet_record(0, event_id="structured")
    assert portal.post(cloud_event_bytes(record)).status_code == 204
    found = shown(portal, "structured")
    assert found["event"]["vms"][0]["record_id"] == record.id
    assert found["records"] == [json.loads(body_of(record))]


def test_batch_of_cloudevents_is_stored(portal):
    records = [fleet_record(vm, event_id="batch") for vm in range(20)]
    assert portal.post(batch(records), content_type=f"{BATCH}; charset=utf-8").status_code == 204
    assert len(shown(portal, "batch")["event"]["vms"]) == 20


def test_binary_cloudevent_is_stored(portal):
    record = fleet_record(0, event_id="binary", sequence=7)
    answer = portal.post(body_of(record), content_type="application/json", **binary_headers(record))
    assert answer.status_code == 204
    assert shown(portal, "binary")["event"]["vms"][0]["record_id"] == record.id


def test_repeated_record_is_accepted_and_changes_nothing(portal):
    record = fleet_record(0, event_id="again", sequence=8)
    for _ in range(3):
        assert portal.post(cloud_event_bytes(record)).status_code == 204
    assert len(shown(portal, "again")["records"]) == 1


@pytest.mark.parametrize("token", [None, "", "wrong", "readers-token-1", "\u00e4"])
def test_request_without_a_valid_token_is_rejected(portal, token):
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
    answer = requests.post(
        f"{portal.url}/records",
        data=cloud_event_bytes(fleet_record(0, event_id="refused")),
        headers={"Content-Type": STRUCTURED, **headers},
        timeout=20,
    )
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert shown(portal, "refused") is None


def test_changed_token_file_applies_immediately(fresh, tmp_path):
    (tmp_path / "agents").write_text("# the new one first\nnew-token\nagents-token-1\n", encoding="utf-8")
    for token in ("new-token", AGENT_TOKEN):
        assert fresh.post(cloud_event_bytes(fleet_record(0)), token=token).status_code == 204
    (tmp_path / "agents").write_text("new-token\n", encoding="utf-8")
    assert fresh.post(cloud_event_bytes(fleet_record(0)), token=AGENT_TOKEN).status_code == 401
    (tmp_path / "agents").unlink()
    answer = fresh.post(cloud_event_bytes(fleet_record(0)), token="new-token")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")


def _envelope(record=None, **changes):
    value = msgspec.json.decode(cloud_event_bytes(record or fleet_record(0, event_id="wrong", sequence=9)))
    for path, new in changes.items():
        inner = value
        *outer, last = path.split("__")
        for name in outer:
            inner = inner[name]
        if new is None and last != "vm_id":
            del inner[last]
        else:
            inner[last] = new
    return json.dumps(value).encode()


def _nested(levels, record=None):
    return _envelope(record, data__previous={"]": "X"}).replace(b'"X"', b"[" * (levels - 2) + b"]" * (levels - 2))


_DEEP = "[" * 100_000 + "]" * 100_000
_WRONG = {
    "no JSON": b"{",
    "no UTF-8": b'{"id": "\xff"}',
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "another version": _envelope(specversion="0.3"),
    "another type": _envelope(type="com.example.something"),
    "no data": _envelope(data=None),
    "no id": _envelope(id=None),
    "another id": _envelope(id="x"),
    "data that is no record": _envelope(data={"a": 1}),
    "an unknown transition": _envelope(data__transition="exploded" * 100),
    "no event status": _envelope(data__event__event_status=None),
    "a sequence below 0": _envelope(data__sequence=-1),
    "a sequence beyond any database": _envelope(data__sequence=2**63),
    "a time without a zone": _envelope(data__observed_at="2026-11-20T11:00:00"),
    "a time that is none": _envelope(data__observed_at="now"),
    "a time before all others": _envelope(data__observed_at="0001-01-01T00:00:00+23:00"),
    "a NotBefore without a zone": _envelope(data__event__not_before="2026-11-20T11:15:00"),
    "a NotBefore at the end of the calendar": _envelope(data__event__not_before="9999-12-31T23:59:59Z"),
    "a duration of 400 digits": _envelope(data__event__duration_seconds=int("9" * 400)),
    "a NUL in a hash": _envelope(data__approval={"source": "cli", "result": "x", "jws_sha256": ["a\0"]}),
    "a pause of 10^300 seconds": _envelope(data__impact={"longest_seconds": 1e300, "resolution_seconds": 1}),
    "a downtime of 10^300 seconds": _envelope(data__impact={"downtime_seconds": 1e300}),
    "too many hashes": _envelope(data__approval={"source": "cli", "result": "x", "jws_sha256": ["a"] * 1_001}),
    "a NUL in a name": _envelope(data__stream_id="a\0b"),
    "a name that is too long": _envelope(data__stream_id="x" * 257),
    "names and IDs that are too long": _envelope(data__vm__location="x" * 4_096),
    "a vmId that cannot be printed": _envelope(data__vm__vm_id="\u202e"),
    "a lone surrogate": _envelope().replace(b'"Freeze"', b'"\\ud800"'),
    "nested too deeply": _envelope(data__event__extra="X").replace(b'"X"', f'{{"a": {_DEEP}}}'.encode()),
    "65 levels deep": _nested(65),
    "a previous that is a list": _envelope(data__previous=[]),
    "an extra that is a number": _envelope(data__event__extra=5),
    "NaN": _envelope().replace(b'"duration_seconds": 5', b'"duration_seconds": NaN'),
}


def test_transaction_contains_few_records_of_one_vm(tmp_path, monkeypatch):
    most = Counter()

    def recorded(connection, received, *more):
        for key, number in Counter(vm_key(each.record) for each in received).items():
            most[key] = max(most[key], number)
        return add_records(connection, received, *more)

    monkeypatch.setattr(ingest, "add_records", recorded)
    parts = [[fleet_record(0, event_id=f"E-{part}", sequence=n) for n in range(100)] for part in range(8)]
    large = [fleet_record(1, event_id="large", sequence=n) for n in range(450)]
    with RunningPortal(tmp_path, vm_limits={"records_per_minute": 100_000}) as portal, ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda part: portal.post(batch(part), content_type=BATCH).status_code, parts))
        assert statuses == [204] * 8
        assert most == {vm_id_of(0): 100}
        assert portal.post(batch(large), content_type=BATCH).status_code == 204
        assert most[vm_id_of(1)] == 200
        assert len(shown(portal, "large")["records"]) == 450


def test_record_of_64_levels_is_stored(portal):
    assert portal.post(_nested(64, fleet_record(0, event_id="64 levels"))).status_code == 204


def test_record_with_a_long_description_is_stored(portal):
    record = fleet_record(0, event_id="long", description="x" * 10_000)
    assert portal.post(cloud_event_bytes(record)).status_code == 204


def test_notbefore_with_an_offset_is_shown_in_utc(portal):
    body = _envelope(fleet_record(0, event_id="offset"), data__event__not_before="2026-11-20T16:15:00+05:00")
    assert portal.post(body).status_code == 204
    assert shown(portal, "offset")["event"]["event"]["not_before"] == "2026-11-20T11:15:00Z"


@pytest.mark.parametrize("body", _WRONG.values(), ids=_WRONG)
def test_invalid_record_is_rejected_with_400_and_not_stored(portal, body):
    answer = portal.post(body)
    assert answer.status_code == 400
    assert len(answer.json()["error"]) < 400
    assert shown(portal, "wrong") is None


def test_batch_with_one_invalid_record_is_rejected_completely(portal):
    good = fleet_record(0, event_id="in a wrong batch")
    body = b"[" + cloud_event_bytes(good) + b"," + _envelope(data__sequence=-1) + b"]"
    assert portal.post(body, content_type=BATCH).status_code == 400
    assert portal.post(b"[]", content_type=BATCH).status_code == 400
    assert shown(portal, "in a wrong batch") is None


def test_body_limit_is_one_mebibyte(portal):
    record = fleet_record(0, event_id="large", sequence=11)
    body = cloud_event_bytes(record)
    room = MAX_BODY_BYTES - len(body)
    assert portal.post(body + b" " * room).status_code == 204
    answer = portal.post(body + b" " * (room + 1))
    assert (answer.status_code, answer.headers["Connection"]) == (413, "close")

    def in_chunks():
        yield body
        for _ in range(room // 1024 + 1):
            yield b" " * 1024

    assert portal.post(in_chunks()).status_code == 413


def test_late_body_closes_the_connection(tmp_path):
    with (
        RunningPortal(tmp_path, request_seconds=0.3) as portal,
        socket.create_connection(portal.portal.address, timeout=20) as client,
    ):
        client.sendall(
            f"POST /api/v1/records HTTP/1.1\r\nHost: x\r\nContent-Type: {STRUCTURED}\r\n"
            f"Authorization: Bearer {AGENT_TOKEN}\r\nContent-Length: 1000\r\n\r\n{{".encode()
        )
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(65_536) == b""


def test_wrong_tokens_are_counted_and_logged_once(fresh, caplog):
    with requests.Session() as session:
        for number in range(100):
            answer = session.post(
                f"{fresh.url}/records", data=b"{}", headers={"Authorization": f"Bearer wrong-{number}"}, timeout=20
            )
            assert answer.status_code == 401
    page = fresh.metrics()
    assert 'scheduled_events_portal_callers_refused_total{reason="wrong_token"} 100.0' in page
    assert "wrong-" not in page
    refusals = [line for line in caplog.messages if "refused" in line]
    assert len(refusals) == 1
    assert "wrong-" not in refusals[0]
