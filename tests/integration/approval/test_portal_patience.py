"""What is on the way to the portal: a gateway that does not wait as long, and many agents that begin together."""

from __future__ import annotations

import json
import logging
import threading
from datetime import datetime, timezone

import pytest
from approver_kit import ANNE, BORIS, ApproverKit
from portal_stub import PortalStub

from bridge.approval.portal_client import AGENT_HEADER, PortalClient
from bridge.approval.portal_poller import PortalPoller
from bridge.approval.service import agent_header
from bridge.clock import Clock
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.errors import PortalFailed
from bridge.metrics.metrics import Metrics

VM = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
KEYS = (KeySettings(kid="k", approver="portal", public_key_file="/nowhere"),)
ATTEMPTS = 20.0
CUT = [{"kind": "status", "status": 502}, {"kind": "status", "status": 504}, {"kind": "disconnect"}]


class Hours:
    """A clock on which each look takes *seconds*: so much passes within a request."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.passed = 0.0

    def monotonic(self):
        self.passed += self.seconds
        return self.passed

    @property
    def clock(self):
        return Clock(now=lambda: datetime.now(timezone.utc), monotonic=self.monotonic, random=lambda: 0.5)


@pytest.fixture
def portal(tmp_path):
    with PortalStub(tmp_path / "portal", tls=False) as portal:
        portal.put(VM, "a decision")
        yield portal


@pytest.fixture
def client(portal):
    def made(seconds, wait_seconds=30):
        hours = Hours(seconds)
        made.hours = hours
        made.clients.append(
            PortalClient(RemoteSettings(url=portal.url, keys=KEYS, wait_seconds=wait_seconds), clock=hours.clock)
        )
        return made.clients[-1]

    made.clients = []
    yield made
    for each in made.clients:
        each.close()


def waits(portal):
    return [request.wait_seconds for request in portal.requests]


@pytest.mark.parametrize("fault", CUT, ids=str)
def test_what_breaks_off_a_held_request_halves_the_wait_down_to_five_seconds(portal, client, fault):
    asked = client(6.0)
    portal.strike(**fault)
    for _ in range(3):
        with pytest.raises(PortalFailed) as failed:
            asked.poll(VM, index=0)
        assert failed.value.is_cut_short
    with pytest.raises(PortalFailed) as failed:
        asked.poll(VM, index=0)
    assert not failed.value.is_cut_short  # shorter it does not get: now it is a failure like any other
    assert waits(portal) == [30, 15, 7, 5]
    portal.heal()
    asked.poll(VM, index=0)
    assert waits(portal)[-1] == 5


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        *((fault, 1.0) for fault in CUT),
        ({"kind": "status", "status": 500}, 6.0),
        ({"kind": "status", "status": 503}, 6.0),
        ({"kind": "garbage"}, 6.0),
        ({"kind": "cut"}, 6.0),
    ],
    ids=str,
)
def test_what_fails_at_once_or_otherwise_halves_nothing(portal, client, fault, seconds):
    asked = client(seconds)
    portal.strike(**fault)
    with pytest.raises(PortalFailed) as failed:
        asked.poll(VM, index=0)
    assert not failed.value.is_cut_short
    portal.heal()
    asked.poll(VM, index=0)
    assert waits(portal) == [30, 30]


def test_an_hour_later_the_configured_wait_is_asked_for_again(portal, client):
    asked = client(6.0)
    portal.strike("status", status=504)
    with pytest.raises(PortalFailed):
        asked.poll(VM, index=0)
    portal.heal()
    asked.poll(VM, index=0)
    client.hours.passed += 3600
    asked.poll(VM, index=0)
    assert waits(portal) == [30, 15, 30]


def test_a_gateway_that_is_less_patient_is_no_failure(portal, client, caplog):
    caplog.set_level(logging.INFO)
    delays, taken, metrics = [], threading.Event(), Metrics()
    asked = client(6.0)
    portal.strike("status", status=504, count=2)

    def wait(stop, seconds):
        delays.append(seconds)
        return stop.wait(0.01)

    poller = PortalPoller(
        asked,
        vm_id=lambda: VM,
        receive=lambda _tokens: taken.set(),
        metrics=metrics.approval_channel(),
        first_within_seconds=1.0,
        clock=Clock(now=lambda: datetime.now(timezone.utc), random=lambda: 0.5),
        wait=wait,
    )
    poller.start()
    assert taken.wait(ATTEMPTS)
    poller.stop()
    assert delays[:3] == [0.5, 0.5, 0.5]  # before the first request, and once for each that was cut
    said = [record for record in caplog.records if record.name == "bridge.approval.portal_poller"]
    assert {record.levelno for record in said} == {logging.INFO}
    assert "it is asked to hold 7 s from now on" in caplog.text


def test_the_agent_says_which_decisions_it_would_follow(tmp_path):
    kit = ApproverKit(tmp_path)
    kit.trust(("k1", ANNE), ("k2", BORIS), required=2)
    (tmp_path / "k2.key.pub").unlink()
    keys = kit.settings.trusted_keys()
    said = agent_header(kit.settings, keys, version="1.2.3", is_disabled=True)
    assert json.loads(said) == {
        "version": "1.2.3",
        "kids": ["k1"],
        "required_approvals": 2,
        "dry_run": False,
        "disabled": True,
    }
    assert said.isascii()


def test_a_list_of_keys_that_is_too_long_for_a_header_is_left_out(tmp_path):
    kit = ApproverKit(tmp_path)
    kit.trust(*((f"{'k' * 120}{number}", f"person {number}") for number in range(40)))
    said = agent_header(kit.settings, kit.settings.trusted_keys(), version="1", is_disabled=False)
    assert len(said) < 200
    assert "kids" not in json.loads(said)


def test_each_request_of_an_agent_has_the_header(portal, tmp_path):
    kit = ApproverKit(tmp_path)
    kit.trust(("k1", ANNE))
    remote = RemoteSettings(url=portal.url, keys=kit.settings.remote.keys, wait_seconds=1)
    kit.settings = type(kit.settings)(remote=remote, dry_run=True)
    kit.start()
    kit.service.start()
    assert portal.wait_for_requests(2)
    kit.service.stop()
    kit.close()
    first, second = (json.loads(each.asked.headers[AGENT_HEADER.lower()]) for each in portal.requests[:2])
    assert first == second
    assert (first["kids"], first["dry_run"], first["disabled"]) == (["k1"], True, False)
