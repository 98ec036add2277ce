"""A signal sets its event, even while the main thread waits for this event."""

import signal
import subprocess
import sys

import pytest

#: Sends thousands of signals at the times when the wait for the event begins or ends.
STRIKE = """
import random, signal, threading, time
from bridge.cli.signals import SignalEvents
event = threading.Event()
SignalEvents().set_on([signal.SIGALRM], event)
end, came = time.monotonic() + 3, 0
while time.monotonic() < end:
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.0002))
    came += event.wait(0.0001)
    event.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
print(came)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals")
def test_signals_during_the_wait_for_their_event_never_block_the_wait():
    done = subprocess.run([sys.executable, "-c", STRIKE], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 100


#: Delivers a signal to another thread, or raises a signal without a sender as a Windows service host does.
ELSEWHERE = """
import _thread, signal, sys, threading, time
from bridge.cli.signals import SignalEvents
event, other_has_ended = threading.Event(), threading.Event()
SignalEvents().set_on([signal.SIGUSR1], event)
def send_to_itself():
    time.sleep(0.5)
    if sys.argv[1] == "signal":
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    else:
        _thread.interrupt_main(signal.SIGUSR1)
    other_has_ended.wait(60)
threading.Thread(target=send_to_itself, daemon=True).start()
print(event.wait(20))
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads")
@pytest.mark.parametrize("how", ["signal", "interrupt"])
def test_signal_in_another_thread_ends_the_wait_of_the_main_thread(how):
    argv = [sys.executable, "-c", ELSEWHERE, how]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "True")
