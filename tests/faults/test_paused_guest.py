"""The sampler in a guest that is paused for 3 s measures the pause to within 0.3 s, or reports null with a reason.

``GUEST_KERNEL=FILE pytest -m long -s tests/faults/test_paused_guest.py`` runs the test, and so does `.ci/run guest`.
"""

import json
import time
from email.utils import formatdate
from pathlib import Path

import msgspec
import pytest
import qemu_guest

import bridge

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PAUSE_SECONDS = 3.0
#: The second thread causes context switches, as the programs of a VM do.
PROGRAM = """
import json, sys, threading, time
from bridge.impact.report import impact_of
from bridge.impact.sampler import Sampler
import msgspec

def work():
    while True:
        time.sleep(0.002)

threading.Thread(target=work, daemon=True).start()
sampler = Sampler()
sampler.start()
sampler.watch(is_near=True)
began = time.time()
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("Date: "):
        sampler.responded(line.removeprefix("Date: ").strip())
        continue
    impact = impact_of(sampler, started_at=began, ended_at=time.time())
    print(msgspec.json.encode(impact).decode(), flush=True)
"""


@pytest.fixture
def guest(tmp_path):
    reason = qemu_guest.why_not()
    if reason is not None:
        pytest.skip(reason)
    guest = qemu_guest.Guest(tmp_path, PROGRAM, [Path(bridge.__file__).parent, Path(msgspec.__file__).parent])
    try:
        assert guest.read() == "ready"
        yield guest
    finally:
        guest.close()


def poll(guest, seconds):
    """Send the header of an IMDS response once a second."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        guest.write(f"Date: {formatdate(usegmt=True)}")
        time.sleep(1)


@pytest.mark.parametrize("with_clocks", [False, True])
def test_pause_of_a_guest_is_measured_or_reported_as_unknown(guest, with_clocks):
    poll(guest, 20)  # the usual rate of context switches
    (guest.pause_with_clocks if with_clocks else guest.pause_without_clocks)(PAUSE_SECONDS)
    poll(guest, 5)
    guest.write("report")
    impact = json.loads(guest.read())
    print(f"bench: a guest that is paused {'with' if with_clocks else 'without'} its clocks: {impact}")  # noqa: T201
    if impact["longest_seconds"] is None or with_clocks:
        assert impact["longest_seconds"] is None
        assert impact["reason"]
    else:
        assert impact["longest_seconds"] == pytest.approx(PAUSE_SECONDS, abs=0.3)
