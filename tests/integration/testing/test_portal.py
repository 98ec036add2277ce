"""The stub of an ops portal says what PROTOCOL.md has a portal say, and fails as it is told to."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
import requests
from portal_stub import PortalStub

from bridge.approval.decision_token import verify
from bridge.approval.digest import digest
from bridge.config.approval import RemoteSettings
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import DeadlineExceeded
from bridge.events.event import ScheduledEvent
from bridge.http.session import DeadlineSession

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import msgspec

VM = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
EVENT = ScheduledEvent(event_id="E1", event_type="Freeze", event_status="Scheduled", resources=("WestNO_0",))
HELD_SECONDS = 20.0


@pytest.fixture
def session():
    with DeadlineSession() as session:
        yield session


@pytest.fixture
def portal(tmp_path):
    with PortalStub(tmp_path / "portal", tls=False) as portal:
        yield portal


def ask(session, portal, index, *, wait=0, vm_id=VM, token=None, **options):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    verify_with = str(portal.ca_file) if portal.ca_file else True
    return session.request(
        "GET",
        f"{portal.url}/vms/{vm_id}/decisions",
        params={"index": str(index), "wait": str(wait)},
        headers=headers,
        **{"deadline_seconds": 30, "verify": verify_with, **options},
    )


def said(response):
    assert response.status_code == 200
    return response.json()["index"], response.json()["decisions"]


def test_index_zero_is_answered_at_once_with_what_there_is_or_nothing(session, portal):
    assert said(ask(session, portal, 0, wait=HELD_SECONDS)) == (1, [])
    portal.put(VM, "a", "b")

    assert said(ask(session, portal, 0, wait=HELD_SECONDS)) == (3, ["a", "b"])


def test_a_request_is_held_until_a_decision_for_its_vm_comes(session, portal):
    portal.put(VM, "old")
    threading.Thread(
        target=lambda: (portal.wait_for_requests(1), portal.put("another", "x"), portal.put(VM, "new")), daemon=True
    ).start()
    began = time.monotonic()

    assert said(ask(session, portal, 2, wait=HELD_SECONDS)) == (4, ["new"])
    assert time.monotonic() - began < HELD_SECONDS / 2


def test_a_request_with_nothing_new_is_answered_empty_after_its_wait(session, portal):
    began = time.monotonic()

    assert said(ask(session, portal, 1, wait=0.3)) == (1, [])
    assert time.monotonic() - began >= 0.3


def test_a_restored_portal_answers_a_greater_index_at_once_with_its_own(session, portal):
    portal.put(VM, "a", "b")
    portal.lose_state()

    assert said(ask(session, portal, 3, wait=HELD_SECONDS)) == (1, [])
    portal.put(VM, "c", "d")
    portal.lose_state(keeps_decisions=True)
    assert said(ask(session, portal, 0)) == (3, ["c", "d"])


def test_more_than_a_thousand_decisions_come_in_pages(session, portal):
    portal.put(VM, *map(str, range(1_500)))

    index, first = said(ask(session, portal, 0))
    assert (index, len(first)) == (1_001, 1_000)
    index, second = said(ask(session, portal, index))
    assert (index, first + second) == (1_501, [*map(str, range(1_500))])


def test_an_expired_decision_is_no_longer_there(session, tmp_path):
    clock = [datetime(2030, 1, 1, tzinfo=timezone.utc)]
    with PortalStub(tmp_path / "portal", tls=False, now=lambda: clock[0]) as portal:
        token = portal.decide(EVENT, vm_id=VM, valid_seconds=60)
        clock[0] += timedelta(seconds=59)
        assert said(ask(session, portal, 0))[1] == [token]
        clock[0] += timedelta(seconds=2)
        assert said(ask(session, portal, 0)) == (2, [])


def test_a_decision_of_the_stub_is_one_that_an_agent_accepts(portal):
    now = datetime.now(timezone.utc)
    second = portal.add_key("second-key", approver="second")
    for kid, approver in ((portal.kid, "portal"), ("second-key", "second")):
        token = portal.decide(EVENT, vm_id=VM, kid=kid, decision="hold", reason="not tonight", jti=f"j-{kid}")
        keys = [TrustedKey(**table) for table in portal.key_tables()]
        decision = verify(token, keys=keys, audience=VM, now=now, created_at=now - timedelta(seconds=60))
        assert (decision.approver, decision.event_digest) == (approver, digest(EVENT))
    assert second == keys[1].public_key_file


def test_its_toml_is_a_remote_table(portal):
    table = tomllib.loads(portal.toml(wait_seconds=5, token_file="/t"))["approval"]["remote"]

    assert msgspec.convert(table, RemoteSettings).url == portal.url


def test_repeats_send_everything_twice_in_every_answer(session, portal):
    portal.repeats = True
    portal.put(VM, "a")
    portal.put(VM, "b")

    assert said(ask(session, portal, 2)) == (3, ["a", "b", "a", "b"])


def test_the_vm_id_is_told_apart_in_lower_case(session, portal):
    portal.put(VM.upper(), "a")

    assert said(ask(session, portal, 0))[1] == ["a"]


def test_over_https_with_its_own_ca(session, tmp_path):
    with PortalStub(tmp_path / "portal") as portal:
        assert portal.url.startswith("https://127.0.0.1:")
        assert said(ask(session, portal, 0)) == (1, [])
        with pytest.raises(requests.exceptions.SSLError):
            ask(session, portal, 0, verify=True)


def test_its_certificates_satisfy_a_strict_client(tmp_path):
    with PortalStub(tmp_path / "portal") as portal:
        context = ssl.create_default_context(cafile=portal.ca_file)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        port = int(portal.url.split(":")[2].partition("/")[0])
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            assert secure.version() == "TLSv1.3"


def test_a_client_without_a_certificate_stays_outside(session, tmp_path):
    with PortalStub(tmp_path / "portal", client_certificates=True) as portal:
        with pytest.raises(requests.RequestException):
            ask(session, portal, 0)
        certificate, key = portal.client_certificate()
        assert said(ask(session, portal, 0, cert=(str(certificate), str(key)))) == (1, [])
        assert len(portal.requests) == 1


def test_another_token_is_refused(session, portal):
    portal.bearer = "right"

    assert ask(session, portal, 0, token="wrong").status_code == 401
    assert ask(session, portal, 0).status_code == 401
    assert said(ask(session, portal, 0, token="right")) == (1, [])
    assert [request.authorization for request in portal.requests] == ["Bearer wrong", None, "Bearer right"]


@pytest.mark.parametrize("path", ["/", "/vms/x", "/vms/x/decisions?index=1", "/vms/x/decisions?index=a&wait=1"])
def test_what_is_no_request_of_the_protocol_is_not_found(session, portal, path):
    assert session.request("GET", portal.url + path, deadline_seconds=10).status_code == 404


def test_faults_strike_as_often_as_they_are_told(session, portal):
    portal.strike("status", status=429, retry_after_seconds=7, count=1)
    portal.strike("garbage", count=1)
    portal.strike("oversize", count=1)
    portal.strike("redirect", count=1)
    first, second, third, fourth, fifth = (ask(session, portal, 0, max_body_bytes=9_000_000) for _ in range(5))

    assert (first.status_code, first.headers["Retry-After"]) == (429, "7")
    assert second.status_code == 200
    with pytest.raises(requests.JSONDecodeError):
        second.json()
    assert len(third.content) > 2_000_000
    assert fourth.status_code == 302
    assert said(fifth) == (1, [])


def test_a_fault_strikes_the_request_that_is_held(session, portal):
    threading.Thread(
        target=lambda: (portal.wait_for_requests(1), portal.strike("status", status=500)), daemon=True
    ).start()
    began = time.monotonic()

    assert ask(session, portal, 1, wait=HELD_SECONDS).status_code == 500
    assert time.monotonic() - began < HELD_SECONDS / 2
    portal.heal()
    assert said(ask(session, portal, 0)) == (1, [])


def test_a_fault_can_be_for_one_vm_only(session, portal):
    portal.strike("status", vm_id="another", status=404)

    assert said(ask(session, portal, 0)) == (1, [])
    assert ask(session, portal, 0, vm_id="another").status_code == 404


def test_silence_lasts_until_the_client_gives_up(session, portal):
    portal.strike("silence", count=1)
    with pytest.raises(DeadlineExceeded):
        ask(session, portal, 0, deadline_seconds=0.3)

    assert said(ask(session, portal, 0)) == (1, [])


def test_down_refuses_and_up_listens_at_the_same_address_with_what_it_had(session, tmp_path):
    with PortalStub(tmp_path / "portal") as portal:
        before = portal.url
        portal.put(VM, "a")
        assert said(ask(session, portal, 0)) == (2, ["a"])
        portal.down()
        for _ in range(2):
            with pytest.raises(requests.ConnectionError):
                ask(session, portal, 0)
        portal.up()
        assert portal.url == before
        assert said(ask(session, portal, 0)) == (2, ["a"])


def test_going_down_ends_the_requests_it_holds(session, portal):
    threading.Thread(target=lambda: (portal.wait_for_requests(1), portal.down()), daemon=True).start()
    began = time.monotonic()
    with pytest.raises(requests.ConnectionError):
        ask(session, portal, 1, wait=HELD_SECONDS)

    assert time.monotonic() - began < HELD_SECONDS / 2
