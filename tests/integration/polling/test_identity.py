import threading

import pytest

from bridge.clock import Clock
from bridge.errors import ImdsStatus, ImdsUnreachable
from bridge.events.event import VmIdentity
from bridge.outbox import meta
from bridge.outbox.outbox import Outbox
from bridge.polling.identity import IdentityResolver, merged

ME = VmIdentity(name="vm_0", vm_id="AAAA", location="westeurope")


class Service:
    """Fails with `failure` until it is null."""

    os_disk_is_ephemeral = None

    def __init__(self, failure=None):
        self.failure = failure
        self.asked = threading.Semaphore(0)

    def identity(self):
        self.asked.release()
        if self.failure is not None:
            raise self.failure
        self.os_disk_is_ephemeral = True
        return ME


@pytest.fixture
def outbox(tmp_path):
    made = Outbox(tmp_path, max_bytes=2**24, keep_delivered_seconds=3600)
    yield made
    made.close()


@pytest.fixture
def keeper_of(outbox):
    keepers = []

    def make(service, configured=VmIdentity(), **options):  # noqa: B008  # frozen
        keepers.append(IdentityResolver(service, outbox, configured, **options))
        keepers[-1].start()
        return keepers[-1]

    yield make
    for keeper in keepers:
        keeper.stop()


def wait_until(predicate):
    for _ in range(500):
        if predicate():
            return
        threading.Event().wait(0.02)
    raise AssertionError(predicate)


def test_what_the_service_says_is_stored(keeper_of, outbox):
    keeper = keeper_of(Service())
    assert (keeper.vm, keeper.is_waiting) == (ME, False)
    assert outbox.read(meta.load).result().vm == ME


def test_whether_the_os_disk_is_ephemeral_is_unknown_until_the_service_answers(keeper_of, outbox):
    outbox.identify(ME).result()  # the name is known; of the disk nothing was stored
    dial, service = Dial(), Service(ImdsUnreachable("silent"))
    keeper = keeper_of(service, clock=Clock(monotonic=dial))
    assert (keeper.vm, keeper.os_disk_is_ephemeral) == (ME, None)
    service.failure = None

    def is_known_a_minute_later():
        dial.seconds += 61
        keeper.look()
        return keeper.os_disk_is_ephemeral is not None

    wait_until(is_known_a_minute_later)
    assert keeper.os_disk_is_ephemeral is True


def test_what_is_configured_wins():
    assert merged(ME, VmIdentity(name="other", tags={"a": "b"})) == VmIdentity(
        name="other", vm_id="AAAA", location="westeurope", tags={"a": "b"}
    )


def test_a_silent_service_leaves_what_was_stored(keeper_of, outbox):
    outbox.identify(ME).result()
    keeper = keeper_of(Service(ImdsUnreachable("silent")))
    assert (keeper.vm, keeper.is_waiting) == (ME, False)


def test_a_vm_that_was_never_known_waits_and_is_told_when_it_is(keeper_of, outbox):
    service = Service(ImdsUnreachable("silent"))
    keeper = keeper_of(service)
    assert keeper.is_waiting
    service.failure = None
    wait_until(lambda: not keeper.is_waiting)
    assert outbox.read(meta.load).result().vm == ME


def test_a_configured_name_is_enough_to_go_on(keeper_of):
    keeper = keeper_of(Service(ImdsUnreachable("silent")), VmIdentity(name="vm_7"))
    assert (keeper.vm.name, keeper.is_waiting) == ("vm_7", False)


class Dial:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.mark.parametrize(
    ("failure", "waits_seconds"),
    [
        (ImdsUnreachable("silent"), 60),
        (ImdsStatus("busy", status=503), 60),
        (ImdsStatus("slow down", status=429), 60),
        (ImdsStatus("no such thing", status=404), 5),
    ],
    ids=["silent", "503", "429", "404"],
)
def test_how_long_records_wait_depends_on_the_answer(keeper_of, failure, waits_seconds):
    dial, service = Dial(), Service(failure)
    keeper = keeper_of(service, clock=Clock(monotonic=dial))
    dial.seconds += waits_seconds - 1
    keeper.look()
    assert keeper.is_waiting
    dial.seconds += 2
    keeper.look()
    wait_until(lambda: not keeper.is_waiting)


def test_an_eviction_waits_two_seconds_at_most(keeper_of):
    dial = Dial()
    keeper = keeper_of(Service(ImdsUnreachable("silent")), clock=Clock(monotonic=dial))
    keeper.hurry()
    dial.seconds += 1
    keeper.look()
    assert keeper.is_waiting
    dial.seconds += 2
    keeper.look()
    wait_until(lambda: not keeper.is_waiting)


def test_stopping_lets_waiting_records_go(keeper_of):
    keeper = keeper_of(Service(ImdsUnreachable("silent")))
    keeper.stop()
    assert not keeper.is_waiting


class SilentService:
    """Answers when it is released."""

    os_disk_is_ephemeral = None

    def __init__(self):
        self.asked = threading.Event()
        self.released = threading.Event()

    def identity(self):
        self.asked.set()
        assert self.released.wait(30)
        return ME


def test_the_start_ends_at_once_when_a_stop_is_asked_for(outbox):
    service = SilentService()
    keeper = IdentityResolver(service, outbox, VmIdentity())
    keeper.start(service.asked.is_set)  # with a request that only the release ends
    assert (keeper.vm, keeper.is_waiting) == (VmIdentity(), False)
    service.released.set()
    keeper.stop()


def test_an_answer_that_is_later_than_the_start_may_wait_is_taken_all_the_same(outbox):
    service = SilentService()
    keeper = IdentityResolver(service, outbox, VmIdentity())
    keeper.start(timeout_seconds=0.1)
    assert keeper.is_waiting
    service.released.set()
    wait_until(lambda: not keeper.is_waiting)
    assert keeper.vm == ME
    assert outbox.read(meta.load).result().vm == ME
    keeper.stop()


def test_an_answer_after_the_stop_changes_nothing(outbox):
    service = SilentService()
    keeper = IdentityResolver(service, outbox, VmIdentity())
    keeper.start(timeout_seconds=0.1)
    keeper.stop(timeout_seconds=0.0)
    service.released.set()
    keeper.stop()
    assert keeper.vm == VmIdentity()
    assert outbox.read(meta.load).result().vm is None
