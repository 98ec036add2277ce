"""The size and the CPU time of each page with a fleet. With BENCH=short, the fleet is smaller."""

import gzip
import http.client
import os
import time
from datetime import timedelta

import pytest

pytest.importorskip("sqlalchemy", reason="the extra [portal] is not installed")

from fleet_records import NOW
from page_kit import AT_11_01, Office
from portal_fleet import fill, record_of

from bridge.portal.fleet import key_of_event_id
from bridge.portal.users import COOKIE

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

IS_SHORT = os.environ.get("BENCH") == "short"
VMS = 1_000 if IS_SHORT else 5_000
PAST = 5_000 if IS_SHORT else 100_000
OPEN = 500
LARGE = key_of_event_id("large")
PAGES = {
    "Now": "/",
    "Now, VM name": "/?q=web-4",
    "Now, held": "/?decision=held",
    "event of 100 VMs": f"/events/{LARGE}",
    "Timeline": "/timeline",
    "Fleet": "/agents?show=all",
    "Fleet, VM name": "/agents?show=all&q=web-4",
    "Audit": "/audit",
}


@pytest.fixture(scope="module")
def office(tmp_path_factory):
    with Office(tmp_path_factory.mktemp("portal"), clock=AT_11_01) as office:
        fill(office.store, vms=VMS, open_events=OPEN, past_events=PAST, now=NOW)
        vms = tuple(range(100))
        large = {"event_id": "large", "sequence": PAST + 2 + OPEN, "not_before": NOW + timedelta(minutes=10)}
        office.portal.send(*(record_of(vm, vms, now=NOW, **large) for vm in vms))
        office.browser("ann").submit(f"/events/{LARGE}", "hold", reason="month end")
        yield office


def test_every_page_is_small_and_uses_little_cpu(office, figure):
    ann = office.browser("ann")
    found = {name: _cost(ann, path) for name, path in PAGES.items()}
    figure(f"{VMS} VMs, {OPEN} open and {PAST} past events")
    for name, (size, compressed, cpu) in found.items():
        figure(f"{name}: {size / 1e3:.0f} KB, {compressed / 1e3:.0f} KB compressed, {cpu:.0f} ms of CPU")
    assert max(size for size, _, _ in found.values()) < 300_000
    assert max(compressed for _, compressed, _ in found.values()) < 60_000
    assert max(cpu for _, _, cpu in found.values()) < 100


def _cost(browser, path):
    """Return the bytes, the compressed bytes, and the least CPU milliseconds of this process for *path*."""
    costs = []
    for _ in range(4):
        connection = http.client.HTTPConnection(browser.origin.removeprefix("http://"), timeout=60)
        before = time.process_time()
        connection.request("GET", path, headers={"Cookie": f"{COOKIE}={browser.cookie}", "Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
        costs.append(1_000 * (time.process_time() - before))
        connection.close()
        assert answer.status == 200
    return len(gzip.decompress(body)), len(body), min(costs)
