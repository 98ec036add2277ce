"""A signal sets its event wherever the main thread just is, inside the wait for that very event included."""

import signal
import subprocess
import sys

import pytest

#: Lets thousands of signals come about when the wait for the event begins or ends.
STRIKE = """
import random, signal, threading, time
from bridge.cli.signals import SignalEvents
event = threading.Event()
SignalEvents().set_on(signal.SIGALRM, event)
end, came = time.monotonic() + 3, 0
while time.monotonic() < end:
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.0002))
    came += event.wait(0.0001)
    event.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
print(came)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals")
def test_signals_that_strike_the_wait_for_their_event_never_block_it():
    done = subprocess.run([sys.executable, "-c", STRIKE], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 100
