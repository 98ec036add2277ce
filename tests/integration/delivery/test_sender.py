"""A send ends by its deadline with any sink, and an abandoned sink is closed before it is created again."""

import asyncio
import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from starved import no_threads
from waiting import until

from bridge.delivery.sender import Sender
from bridge.errors import DeliveryFailed, DeliveryRejected
from bridge.sink import Sink, SinkConfig
from bridge.testing.watching import in_time

TIMEOUT_SECONDS = 1.0
#: The wait for a thread of a test, far above the usual duration.
SOON_SECONDS = 20.0


class Peer:
    """Runs the scripted action at each step of the life cycle of its sinks, and records the steps."""

    def __init__(self):
        self.steps = []
        self.built = 0
        self.hanging = 0
        self.threads = set()
        self.release = threading.Event()
        self.on_build = self.on_send = self.on_close = lambda: None

    def hang(self):
        self.hanging += 1
        self.release.wait(60.0)

    def sink(self):
        peer = self

        class OneSink(Sink):
            def __init__(self):
                super().__init__(SinkConfig())
                peer.built += 1
                self.number = peer.built
                self.step("build")
                peer.on_build()

            def send(self, batch):  # noqa: ARG002  # what it does is the peer's affair
                self.step("send")
                peer.on_send()
                self.step("sent")

            def check(self):
                self.send([])

            def close(self):
                self.step("close")
                peer.on_close()

            def step(self, what):
                peer.threads.add(threading.current_thread())
                peer.steps.append((what, self.number))

        return OneSink()

    def alive(self):
        return [thread for thread in self.threads if thread.is_alive()]


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.release.set()
    for thread in peer.threads:
        thread.join(SOON_SECONDS)


@pytest.fixture
def sender(peer):
    with closing(Sender(peer.sink, name="s", timeout_seconds=TIMEOUT_SECONDS)) as sender:
        yield sender


def raising(error):
    def do():
        raise error

    return do


def failed(sender):
    """Return the DeliveryFailed of a send."""
    with pytest.raises(DeliveryFailed) as caught:
        sender.send([])
    return caught.value


def failed_in_time(sender):
    """Return the DeliveryFailed of a send that hangs each time it is made, and is cut in time."""
    return in_time(lambda: failed(sender), deadline_seconds=TIMEOUT_SECONDS)


def succeeds(sender):
    with contextlib.suppress(DeliveryFailed):
        sender.send([])
        return True
    return False


def test_one_instance_on_one_thread_makes_every_send(peer, sender):
    sender.send([])
    sender.check()
    sender.send([])
    assert peer.built == 1
    assert len(peer.threads) == 1
    assert threading.current_thread() not in peer.threads


def test_sink_is_created_on_demand_and_closed_once(peer):
    Sender(peer.sink, name="s", timeout_seconds=1.0).close()
    assert peer.built == 0
    sender = Sender(peer.sink, name="s", timeout_seconds=1.0)
    sender.send([])
    sender.close()
    sender.close()
    assert [step for step in peer.steps if step[0] == "close"] == [("close", 1)]
    assert not peer.alive()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("odd"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        StopIteration(1),
        TimeoutError("the sink's own"),
        RecursionError(),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_of_a_sink_is_a_failure_and_the_sink_continues(peer, sender, error):
    peer.on_send = raising(error)
    problem = failed(sender)
    assert problem.__cause__ is error
    assert str(problem).startswith(type(error).__name__)
    peer.on_send = lambda: None
    sender.send([])
    assert peer.built == 1


def test_delivery_errors_raised_by_a_sink_are_unchanged(peer, sender):
    said = DeliveryFailed("busy", retry_after=7.0, needs_attention=True)
    peer.on_send = raising(said)
    assert failed(sender) is said
    refused = DeliveryRejected("no", ["x"])
    peer.on_send = raising(refused)
    with pytest.raises(DeliveryRejected) as caught:
        sender.send([])
    assert caught.value is refused


def test_hanging_send_ends_at_its_deadline_and_closes_before_the_retry(peer, sender):
    peer.on_send = peer.hang
    peer.on_close = peer.release.set
    problem = failed_in_time(sender)
    assert "1 s" in str(problem)
    peer.on_send = lambda: None
    hanging = peer.built
    sender.send([])
    steps = [step for step in peer.steps if step[0] != "sent"]
    assert steps.index(("close", hanging)) < steps.index(("build", hanging + 1)) < steps.index(("send", hanging + 1))
    until(lambda: len(peer.alive()) == 1)


def test_hanging_constructor_is_abandoned_and_sends_nothing_later(peer, sender):
    peer.on_build = peer.hang
    failed_in_time(sender)
    hanging = peer.built
    peer.on_build = lambda: None
    sender.send([])
    peer.release.set()
    until(lambda: ("close", hanging) in peer.steps)
    assert ("send", hanging) not in peer.steps
    assert ("sent", hanging + 1) in peer.steps


def test_hanging_close_delays_a_retry_only_to_its_deadline(peer, sender):
    peer.on_send = peer.on_close = peer.hang
    failed(sender)
    failed_in_time(sender)
    peer.on_send = lambda: None
    in_time(lambda: sender.send([]), deadline_seconds=TIMEOUT_SECONDS)


def test_too_many_hanging_sends_suspend_the_sink_until_one_ends(peer):
    with closing(Sender(peer.sink, name="s", timeout_seconds=0.05)) as sender:
        peer.on_send = peer.hang
        # On a busy machine, a send can be abandoned before it hangs. This send ends, and another replaces it.
        until(lambda: "exceeded their deadline" in str(failed(sender)) and peer.hanging == 8)
        built = peer.built
        for _ in range(3):
            assert failed(sender).needs_attention
        assert peer.built == built
        assert peer.hanging == 8
        peer.on_send = lambda: None
        failed(sender)
        peer.release.set()
        until(lambda: not peer.alive())
        until(lambda: succeeds(sender))


def test_an_idle_sink_keeps_no_record_in_memory(sender):
    class Batch(list):
        pass

    batch = Batch()
    seen = weakref.ref(batch)
    sender.send(batch)
    del batch
    until(lambda: gc.collect() is not None and seen() is None)


def test_send_cancelled_before_it_began_fails(peer, sender):
    building, release = threading.Event(), threading.Event()
    peer.on_build = lambda: (building.set(), release.wait(10))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(failed, sender)
        assert building.wait(10)
        sender.cut()
        release.set()
        # If send had returned, the worker would mark the record as delivered.
        assert str(sending.result(10)) == "The send was cut before it began."
    assert ("send", 1) not in peer.steps


def test_missing_thread_is_reported_and_the_sink_sends_when_one_starts(peer, sender):
    with no_threads():
        error = failed(sender)
    assert error.needs_attention
    assert "thread" in str(error)
    sender.send([])
    assert peer.built == 1
